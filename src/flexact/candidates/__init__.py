"""The functions that a site can pick, and which modules and functions of a network are such functions."""
