"""The synthetic studies: which activation made the data, the sweep of α, and the ablation of corrections."""
