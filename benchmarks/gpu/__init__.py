"""Checks and timings of all that runs on a GPU, by one script: python -m benchmarks gpu."""
