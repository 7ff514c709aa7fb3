"""Sequence diffusion: predict hidden residues of a structure store from the structure and the other residues."""
