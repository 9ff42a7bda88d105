"""The routed activation as Triton kernels."""
