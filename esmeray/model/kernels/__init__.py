"""Triton kernels, each with a torch implementation that gives the same results on the CPU."""
