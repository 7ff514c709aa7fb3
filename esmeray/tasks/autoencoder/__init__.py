"""The ESM-2 autoencoder: compress the features of each residue to a latent and reconstruct them."""
