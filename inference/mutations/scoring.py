"""Scores of mutants of a protein, from Python."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from esmeray.inference.mutations.fitted import scores_of
from esmeray.inference.mutations.section import MutationsSection
from esmeray.inference.mutations.variants import Protein


def score_mutants(
    model: str | Path,
    sequence: str,
    mutants: Sequence[str],
    *,
    method: Literal["wild_type", "masked", "pseudo"] = "masked",
    first_position: int = 1,
    device: str | None = None,
) -> NDArray[np.float64]:
    """(N,) zero-shot scores of mutants, log-probability ratios to the wild type (Meier et al. 2021), or what a model of
    ``esmeray mutations fit`` predicts.

    Args:
        model: a masked language model, as :func:`esmeray.open_model` takes it, or a fitted one.
        sequence: the wild type.
        mutants: as A24G or A24G:C25D.
        method: wild_type is one pass, masked one for each mutated position, pseudo one for each position of each
            mutant (Salazar et al. 2020).
        first_position: number of the first residue.
        device: cpu, cuda, cuda:1 ...; by default CUDA where there is one.

    Raises ValueError for a mutant that the wild type can't have, ConfigError for another kind of model.

    >>> esmeray.score_mutants("esm2", "MKTAYIAKQR", ["K2R", "T3S:A4G"], method="wild_type").shape
    (2,)
    """
    protein = Protein(sequence, first_position)
    # A job as the command's, in a folder that goes: nothing of a call from Python is resumed.
    section = MutationsSection(sequence=Path(), method=method, device=device)
    with TemporaryDirectory() as folder:
        (scores_N,) = scores_of([str(model)], protein, [*map(protein.mutant, mutants)], section, Path(folder), {})
    return scores_N
