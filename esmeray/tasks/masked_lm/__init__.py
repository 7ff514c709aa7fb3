"""Masked language modelling: the residues of a store, some of which are hidden and predicted."""
