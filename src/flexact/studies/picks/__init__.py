"""The benchmark of picks: ten tasks, and what picking gains and costs on each."""
