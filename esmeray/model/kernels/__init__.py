"""Kernels in Triton, each with a path in torch that gives the same results on the CPU."""
