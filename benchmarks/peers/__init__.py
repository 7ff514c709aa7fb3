"""The peers: other software, used as its users use it."""
