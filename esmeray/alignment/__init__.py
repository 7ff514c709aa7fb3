"""Local alignment of proteins with all of a store, as BLAST reports it, by exact Smith-Waterman."""
