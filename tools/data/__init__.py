"""Convert FASTA and structure files to stores, and inspect stores.

esmeray data convert --data.source proteins.fasta.gz --convert.store proteins_store
"""
