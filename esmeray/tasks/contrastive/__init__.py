"""Contrastive learning: proteins of one group, whose labels may be nested, get similar vectors."""
