"""Compute embeddings of proteins; join, search and plot them.

esmeray embed run --embed.models facebook/esm2_t6_8M_UR50D --embed.input proteins.fasta --embed.output vectors
"""
