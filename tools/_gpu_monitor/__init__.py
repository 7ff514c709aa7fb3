"""Parts of ``python -m tools gpu_monitor``."""
