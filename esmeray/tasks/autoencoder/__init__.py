"""The ESM-2 autoencoder: features of each residue of a store to a latent and back."""
