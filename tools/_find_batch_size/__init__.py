"""The search of ``python -m tools find_batch_size`` and its table."""
