"""The benchmark of picks: what picking gains and costs on ten tasks."""
