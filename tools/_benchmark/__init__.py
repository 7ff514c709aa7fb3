"""The parts of ``python -m tools benchmark``: stages, how they are measured, what is advised and how it is shown."""
