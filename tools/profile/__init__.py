"""Measure models and devices, check and record GPUs.

esmeray profile model facebook/esm2_t6_8M_UR50D --data.source proteins.fasta
"""
