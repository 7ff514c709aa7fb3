"""The parts of ``python -m tools profile_classifier``: what is kept of a profile, and how it is shown."""
