"""Heat map of the scores of all single mutants of a protein. Shape legend: L residues, N mutants."""

from pathlib import Path

import numpy as np
from matplotlib.colors import CenteredNorm
from numpy.typing import NDArray

from esmeray.common.figure_style import INK, picture
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.mutations.variants import Protein

_PANEL_POSITIONS = 100


def draw_scan(path: Path, protein: Protein, scores_N: NDArray[np.float64], title: str) -> None:
    """Draw a column per position and a row per amino acid. The wild type is a dot. Long proteins are wrapped.

    ``scores_N``: scores of :meth:`Protein.singles`, in their order.
    """
    length = len(protein.sequence)
    # NaN is not drawn: a position whose wild type is not an amino acid has no mutants and stays grey.
    scores_20L = np.full((len(AMINO_ACIDS), length), np.nan)
    mutations = [mutant.mutations[0] for mutant in protein.singles()]
    for mutation, score in zip(mutations, scores_N.tolist(), strict=True):
        scores_20L[AMINO_ACIDS.index(mutation.mutant), mutation.offset] = score
    starts = range(0, length, _PANEL_POSITIONS)
    shown = min(length, _PANEL_POSITIONS)
    with picture(path, max(6.0, 0.14 * shown + 1.5), 3.2 * len(starts) + 0.6, title) as figure:
        panels = figure.subplots(len(starts), squeeze=False)[:, 0]
        # Symmetric around 0: scaled to each extreme separately, a gain of 0.3 would be as dark as a loss of 3.
        norm = CenteredNorm(0.0, max(1e-3, float(np.nanmax(np.abs(scores_20L)))))
        for start, axes in zip(starts, panels, strict=True):
            offsets = np.arange(start, min(start + _PANEL_POSITIONS, length))
            image = axes.imshow(scores_20L[:, offsets], cmap="RdBu", norm=norm, aspect="auto", interpolation="nearest")
            rows = np.array([AMINO_ACIDS.find(protein.sequence[offset]) for offset in offsets.tolist()], dtype=float)
            axes.plot(offsets - start, np.where(rows < 0, np.nan, rows), ".", color=INK, markersize=4)
            # All panels have the same x range, so that positions have the same width in the last one.
            axes.set(xlim=(-0.5, shown - 0.5), facecolor="#e6e8eb")
            axes.set_yticks(range(len(AMINO_ACIDS)), [*AMINO_ACIDS], fontsize=7, family="monospace")
            # Ticks use the protein's own numbering, as in papers, which need not start at 1.
            positions = offsets + protein.first
            axes.set_xticks(
                offsets[positions % 10 == 0] - start, [*map(str, positions[positions % 10 == 0])], fontsize=8
            )
        figure.colorbar(image, ax=panels, label="score; dots: wild type", shrink=0.6, aspect=30)
