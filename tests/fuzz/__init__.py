"""Damaged and hostile files for every reader of foreign files."""
