"""Compares fixed activations and Flex-Act in a user's own network and training, paired by seed."""
