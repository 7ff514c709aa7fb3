"""The classifier: classes, labels or numbers per record, or a class per residue."""
