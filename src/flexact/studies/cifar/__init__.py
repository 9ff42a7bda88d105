"""The image study: CIFAR with ResNets, as a grid of runs that can be resumed."""
