"""Train a model, export it, and show the state of a run.

esmeray train --config train_config/esm2ae.yaml --data.source proteins.fasta.gz
"""
