"""Sequence diffusion: hidden residues of a structure store, predicted from the structure and from the others."""
