"""A part of ``esmeray profile classifier``: how a profile is shown."""
