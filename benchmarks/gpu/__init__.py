"""What runs on a GPU, checked and timed by one script: python -m benchmarks gpu."""
