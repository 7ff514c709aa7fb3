"""The logo shows the native sequence unchanged, whatever the designs are."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from matplotlib.colors import same_color
from matplotlib.figure import Figure

from esmeray.common.figure_style import GREY
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.structures.store import Structure
from esmeray.inference.design.report import draw_logo
from esmeray.inference.design.sampling import Design


def designs_of(*texts: str) -> list[Design]:
    half = np.eye(len(AMINO_ACIDS), dtype=np.float32) / 2
    probabilities = [half[[AMINO_ACIDS.index(letter) for letter in text]] for text in texts]
    return [Design(*design, number) for number, design in enumerate(zip(texts, probabilities, strict=True))]


def test_native_residues_are_coloured_where_most_designs_agree(saved_figures: list[Figure], tmp_path: Path):
    # Designs that agree per position: all, none, two of four (a tie), three of four, unknown, none.
    designs = designs_of("MAAKKV", "MAWKKV", "MAAKKV", "MAWRKV")
    structure = replace(Structure.unknown("fold", "MLWKXI"), numbers=256 * np.array([8, 9, 10, 15, 19, 20]))
    draw_logo(tmp_path / "logo.png", structure, designs)
    (figure,) = saved_figures
    (axes,) = figure.axes
    assert "".join(text.get_text() for text in axes.texts) == "MLWKXI"
    are_grey = [same_color(text.get_color(), GREY) for text in axes.texts]
    assert are_grey == [False, True, True, False, True, True]
    boxes = [outline.get_extents() for outline in axes.collections[0].get_paths()]
    heights = [round(box.height, 2) for box in boxes if int(box.x0) in (2, 3)]
    assert heights == [0.5, 0.5, 0.25, 0.75], "the shares of a tie, and of one design against three"
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["10", "20"]
    assert axes.lines[0].get_ydata().tolist() == [0.5] * 6
    assert figure.get_suptitle() == "fold: 4 designs, 3 distinct"
