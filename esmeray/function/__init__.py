"""Protein function as terms of an ontology: the ontology, annotations, propagation, evaluation."""
