"""Settings to choose the layer of a model for a labelled table."""

from pathlib import Path

from pydantic import Field

from esmeray.train_config.section import ComputeSection, NonNegativeInt


class LayersSection(ComputeSection):
    """Labelled records, task and outputs, and how the model runs."""

    input: list[str] = Field(min_length=1)
    """Labelled files, folders or quoted globs: CSV, TSV, Parquet or FASTA."""
    retrieval: bool = False
    """Score a layer by the label of each protein's nearest neighbour instead of a probe, for labels with few records
    each, e.g. families."""
    report: Path | None = None
    """Folder for layers.csv and layers.png. Default: layers-INPUT in the current folder."""
    output: Path | None = None
    """Folder for the model cut at the chosen layer. Default: none."""
    seed: NonNegativeInt = 0
    """Random seed of folds, sampled residues and intervals."""
