"""Exact Smith-Waterman alignment of proteins with a whole store, reported as by BLAST."""
