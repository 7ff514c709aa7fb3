"""Align proteins with all of a store, exactly, and write the best hits as BLAST does.

esmeray align proteins.fasta proteins.store --output hits.tsv
"""
