"""The parts of ``python -m tools gpu_check``: what each library sees, two steps of training, and how both are shown."""
