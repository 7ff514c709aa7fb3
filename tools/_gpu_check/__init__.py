"""The training steps of ``python -m tools gpu_check``."""
