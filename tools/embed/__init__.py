"""Compute embeddings of proteins; join, search and plot them.

esmeray embed --model facebook/esm2_t6_8M_UR50D --input proteins.fasta.gz --output embeddings
"""
