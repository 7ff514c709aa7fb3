"""Function prediction: ontology terms per protein, by a head on vectors or by a backbone."""
