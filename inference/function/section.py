"""Settings of a prediction of terms."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from esmeray.train_config.section import PositiveInt, Section


class PredictTermsSection(Section):
    """Sequences, and what is written."""

    input: list[str] = Field(min_length=1)
    """FASTA files, folders, quoted globs, or one store."""
    output: Path
    """TSV file to write."""
    terms: PositiveInt = 500
    """Most terms of a protein, over all aspects."""
    part: Literal["blend", "naive", "homology", "neighbours", "network"] = "blend"
    """Scores to write: the blend, or those of one of its parts alone."""
