"""The classifier: classes, labels or numbers of each labelled record, or a class of each residue."""
