"""Predict labels by a trained classifier, and evaluate it.

esmeray classify predict runs/locations proteins.fasta --output locations.csv
"""
