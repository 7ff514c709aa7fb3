"""The training steps of ``esmeray profile gpu``."""
