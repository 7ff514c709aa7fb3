"""Contrastive learning: vectors that lie close for proteins of one group, whose labels may be nested."""
