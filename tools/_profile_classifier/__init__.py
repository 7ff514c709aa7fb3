"""A part of ``python -m tools profile_classifier``: how a profile is shown."""
