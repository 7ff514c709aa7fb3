"""Predict labels by a trained classifier, and evaluate it.

esmeray classify predict runs/locations --predict.input proteins.fasta --predict.output locations.csv
"""
