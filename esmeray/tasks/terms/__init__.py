"""Function prediction: terms of an ontology for each protein, by a head on vectors, or by a backbone."""
