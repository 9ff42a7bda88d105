"""CIFAR-10 and CIFAR-100: downloaded, read, checked and augmented, for the studies that train on them."""
