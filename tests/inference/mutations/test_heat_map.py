"""The heat map shows each score at its amino acid and its position in the protein's numbering."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.mutations.heat_map import draw_scan
from esmeray.inference.mutations.variants import Protein
from tests.model.support import random_sequences

(WILD,) = random_sequences([120])


def test_each_score_stands_at_its_position_and_amino_acid(saved_figures: list[Figure], tmp_path: Path):
    sequence = f"{WILD[:7]}X{WILD[8:]}"
    protein = Protein(sequence, first=24)
    mutations = [mutant.mutations[0] for mutant in protein.singles()]
    scores = np.random.default_rng(0).normal(-1, 2, len(mutations))
    draw_scan(tmp_path / "map.png", protein, scores, "wild$1$.fasta by model, masked")
    (figure,) = saved_figures
    *panels, bar = figure.axes
    drawn = {}
    for axes in panels:
        (image,), (dots,) = axes.images, axes.lines
        ticks = zip(axes.get_xticks().tolist(), axes.get_xticklabels(), strict=True)
        # A reader locates a column only by its distance from a tick and the tick's label.
        (first,) = {round(int(label.get_text()) - column) for column, label in ticks}
        letters = [label.get_text() for label in axes.get_yticklabels()]
        assert letters == [*AMINO_ACIDS] and image.origin == "upper"
        for (row, column), score in np.ndenumerate(image.get_array().filled(np.nan)):
            if np.isfinite(score):
                drawn[f"{letters[row]}{column + first}"] = score
        for column, row in dots.get_xydata():
            letter = sequence[int(column) + first - 24]
            assert np.isnan(row) if letter == "X" else letters[int(row)] == letter
        assert image.norm(0.0) == 0.5  # white: as good as the wild type; below it is red, above it blue
        assert image.norm(1.0) - 0.5 == pytest.approx(0.5 - image.norm(-1.0))
        red, _, blue, _ = image.cmap(image.norm(-2.0))
        assert red > blue
    names = [f"{mutation.mutant}{mutation.offset + 24}" for mutation in mutations]
    assert drawn == dict(zip(names, scores, strict=True)) and len(panels) == 2
    assert bar.get_ylabel() == "score; dots: wild type"
