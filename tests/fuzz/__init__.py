"""Damaged and hostile files for every reader of files that others made."""
