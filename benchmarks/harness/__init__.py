"""The harness: what a stage is, what it works on, how it is measured, and its results, table and picture."""
