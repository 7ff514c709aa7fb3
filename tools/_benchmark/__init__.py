"""The parts of ``python -m tools benchmark``: what is measured and how, the stages, and how they are shown."""
