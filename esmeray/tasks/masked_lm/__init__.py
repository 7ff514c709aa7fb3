"""Masked language modelling: hide some residues of a store's sequences and predict them."""
