"""Predict functions of proteins, and evaluate predictions as CAFA does.

esmeray function predict runs/function proteins.fasta --output functions.tsv
"""
