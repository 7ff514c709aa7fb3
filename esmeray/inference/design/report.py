"""Logos and tables of designs.

Shape legend: N designs, L residues, A = 20 amino acids.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.path import Path as Outline
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D
from numpy.typing import NDArray

from esmeray.alignment.search import Search
from esmeray.common.figure_style import GREY, INK, heading, picture
from esmeray.common.text import counted
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.dataset.structures.store import Structure
from esmeray.inference.design.positions import written_positions
from esmeray.inference.design.sampling import Design, Designer, Request, log_likelihoods, nearest, recovery

_ROW = 60
"""Positions per row of the logo."""
_MAX_ROWS = 10
_COLOURS = {
    **dict.fromkeys("AVILMFWC", "#4c78a8"),
    **dict.fromkeys("KRH", "#e45756"),
    **dict.fromkeys("DE", "#b279a2"),
    **dict.fromkeys("STNQYGP", "#54a24b"),
}


def design_table(
    model: Designer, request: Request, designs: Sequence[Design], search: Search | None, tokens: int
) -> pd.DataFrame:
    """Return a row per design of a structure; with ``search`` also the known sequence that is nearest to it."""
    structure = request.structure
    texts = [design.residues for design in designs]
    ids = [f"{structure.id}_{design.seed + 1}" for design in designs]
    sizes = np.bincount(structure.chains)
    chains = ",".join(f"{name}:{size}" for name, size in zip(structure.chain_names, sizes, strict=True))
    table = pd.DataFrame(
        {
            "id": ids,
            "structure": structure.id,
            "sequence": texts,
            "score": log_likelihoods(model, structure, texts, label=request.label, tokens=tokens),
            "chains": chains if "," in chains else "",
            "fixed": written_positions(structure, request.fixed) if request.fixed else "",
            "recovery": [recovery(text, structure.residues) for text in texts],
        }
    )
    # At a low temperature the likeliest sequence is drawn repeatedly.
    first = table.groupby("sequence")["id"].transform("first")
    table.insert(4, "same_as", first.where(first != table["id"], ""))
    if model.weights:
        table["weights"] = model.weights.replace(" ", "_")  # headers of FASTA are split at spaces
    if search is not None:
        table = table.join(pd.DataFrame([nearest(text, search) for text in texts], columns=["novelty", "nearest"]))
    return table


def write_designs(folder: Path, request: Request, designs: Sequence[Design], table: pd.DataFrame) -> None:
    """Append the designs of a structure and their probabilities, and draw their logo.

    The table of probabilities has a line per position: structure, chain, residue number in the file, position from 1,
    native residue, whether it was fixed, and the mean probability of each amino acid over the designs.
    """
    structure = request.structure
    with (folder / "designs.fasta").open("a", encoding="utf-8") as file:
        for row in table.drop(columns="structure").to_dict("records"):
            name, sequence = row.pop("id"), row.pop("sequence")
            values = {key: f"{value:.3f}" if isinstance(value, float) else value for key, value in row.items()}
            header = " ".join(f"{key}={value}" for key, value in values.items() if value)
            file.write(f">{name} {header}\n{sequence}\n")
    mean_LA = np.mean([design.probabilities for design in designs], axis=0)
    probabilities = pd.DataFrame(
        {
            "structure": structure.id,
            "chain": [structure.chain_names[chain] for chain in structure.chains.tolist()],
            "number": structure.residue_labels,
            "position": range(1, len(structure.residues) + 1),
            "native": [*structure.residues],
            "fixed": [int(index in request.fixed) for index in range(len(structure.residues))],
            **dict(zip(AMINO_ACIDS, mean_LA.T, strict=True)),
        }
    )
    path = folder / "probabilities.tsv"
    # One file holds all structures; each is appended when its designs are done.
    probabilities.to_csv(path, sep="\t", index=False, float_format="%.4f", mode="a", header=not path.exists())
    draw_logo(folder / f"{structure.id}.png", structure, designs)


def draw_logo(path: Path, structure: Structure, designs: Sequence[Design]) -> None:
    """Draw the designs' residue frequencies as a logo with the model's confidence, as PNG.

    The native sequence and the file's residue numbers are below the logo.
    """
    native = structure.residues
    labels = structure.residue_labels
    letters_NL1 = np.array([[*design.residues] for design in designs])[..., None]
    shares_LA = (letters_NL1 == [*AMINO_ACIDS]).mean(axis=0)
    surest_L = np.mean([design.probabilities.max(axis=1) for design in designs], axis=0)
    rows = min(_MAX_ROWS, -(-len(native) // _ROW))
    shown = "" if rows * _ROW >= len(native) else f", the first {rows * _ROW} positions"
    distinct = len({design.residues for design in designs})
    equal = "" if distinct == len(designs) else f", {distinct} distinct"
    title = f"{structure.id}: {counted(len(designs), 'design{s}')}{equal}{shown}"
    with picture(path, 12, 1.5 * rows + 0.8, title) as figure:
        for row in range(rows):
            axes = figure.add_subplot(rows, 1, row + 1)
            start = row * _ROW
            rest = slice(start, start + _ROW)
            _logo_row(axes, labels[rest], native[rest], shares_LA[start:], surest_L[start:])
            if not row:
                heading(
                    axes,
                    "below: native residues, coloured if most designs agree; line: probability of the "
                    "likeliest residue",
                )


@cache
def _outline(letter: str) -> Outline:
    """Return the outline of a letter, stretched to the unit square."""
    outline = TextPath((0, 0), letter)
    box = outline.get_extents()
    return outline.transformed(Affine2D().translate(-box.x0, -box.y0).scale(1 / box.width, 1 / box.height))


def _logo_row(axis: Axes, labels: list[str], native: str, shares: NDArray, surest: NDArray) -> None:
    outlines, colours = [], []
    for column, native_letter in enumerate(native):
        bottom = 0.0
        for index in np.argsort(shares[column]):  # the most frequent residue on top, as usual in logos
            share = shares[column, index]
            if share > 0.04:  # lower letters are illegible
                letter = AMINO_ACIDS[index]
                transform = Affine2D().scale(0.9, share).translate(column + 0.05, bottom)
                outlines.append(_outline(letter).transformed(transform))
                colours.append(_COLOURS[letter])
                bottom += share
        # More than half of the designs. On a tie the most frequent residue would depend on the order of the alphabet.
        agrees = native_letter in AMINO_ACIDS and shares[column, AMINO_ACIDS.index(native_letter)] > 0.5
        axis.text(
            column + 0.5,
            -0.22,
            native_letter,
            ha="center",
            va="center",
            fontsize=8,
            family="monospace",
            color=_COLOURS[native_letter] if agrees else GREY,
        )
    # One collection: a patch per letter takes twice the time.
    axis.add_collection(PathCollection(outlines, facecolors=colours, edgecolors=colours))
    for native_text in axis.texts:
        native_text.set_in_layout(False)  # all are inside the axes, and the layout need not measure them
    axis.plot(np.arange(len(native)) + 0.5, surest[: len(native)], color=INK, linewidth=0.8)
    # The last row has the same x range as the others, so its letters have the same width.
    axis.set(xlim=(0, _ROW), ylim=(-0.4, 1.02), yticks=[0, 1])
    ticks = [column for column, label in enumerate(labels) if label.endswith("0")]
    axis.set_xticks([tick + 0.5 for tick in ticks], [labels[tick] for tick in ticks], fontsize=7)
    axis.spines[["top", "right", "bottom"]].set_visible(False)
