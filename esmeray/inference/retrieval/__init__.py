"""Relatives that a search finds: how many before the first foreign protein, and a threshold that bounds its errors."""
