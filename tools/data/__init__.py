"""Convert FASTA and structure files to stores, and inspect stores.

esmeray data convert proteins.fasta.gz proteins_store
"""
