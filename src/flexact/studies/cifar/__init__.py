"""The image study: CIFAR with ResNets, as a grid of runs that can be stopped and gone on with."""
