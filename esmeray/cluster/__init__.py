"""Ray clusters: connect to one or start one, place workers on it, handle signals, and run pools of actors."""
