"""What the tools for classifiers share: options, output files, progress and tables of predictions."""
