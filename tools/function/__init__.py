"""Predict functions of proteins, and evaluate predictions as CAFA does.

esmeray function predict runs/function --data.source proteins.fasta --predict.output functions.tsv
"""
