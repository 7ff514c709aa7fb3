"""Public benchmarks with published values, and the page of them."""
