"""Checks and timings of everything that runs on a GPU, in one script: python -m benchmarks gpu."""
