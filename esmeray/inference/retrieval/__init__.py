"""Homologs found by a search: metrics up to the first false hit, and a threshold that bounds the error rate."""
