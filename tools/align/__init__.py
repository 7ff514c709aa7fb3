"""Align proteins with all of a store, exactly, and write the best hits as BLAST does.

esmeray align --align.queries proteins.fasta --align.store proteins.store --align.output hits.tsv
"""
