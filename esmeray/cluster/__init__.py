"""Ray: connect to a cluster or start one, place workers on it, hear signals, run pools of actors."""
