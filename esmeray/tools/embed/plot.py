"""Draw embeddings as a map of proteins, coloured by a column of a table, or by length.

Writes a folder: embeddings.png, and embeddings.html, a page that works offline, shows id, length and label of the
protein under the pointer, and finds ids. Numeric labels have a colour scale; for classes the legend names the largest.
If there are more than plot.max_points proteins, a random sample is drawn.

Examples:
  esmeray embed plot embeddings --plot.output plot --plot.labels proteins.csv --plot.label_column location
  esmeray embed plot embeddings --plot.output plot --plot.name cls --plot.method umap --plot.max_points 50000
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.text import counted
from esmeray.dataset.embeddings.reader import Embeddings, Values, open_vectors
from esmeray.dataset.labels.values import labels_by_id, labels_of
from esmeray.inference.retrieval.metrics import in_training
from esmeray.tools.grammar import OutputWriter, command
from esmeray.train_config.section import Section

SEED = 0


class PlotSection(Section):
    """Labels, and projection to the plane."""

    output: Path
    """Folder to write the results to."""
    labels: Path | None = None
    """CSV, TSV or Parquet file of labels, with a column id. Default: colours show lengths."""
    label_column: str = "label"
    """Name of the column of labels in the file of labels."""
    not_missing: list[str] = Field(default=[])
    """Labels that are names, although tables use them for missing values, e.g. NA (neuraminidase)."""
    method: Literal["pca", "umap"] = "pca"
    """Projection to the plane; umap needs umap-learn."""
    name: str | None = None
    """Output to draw. Default: the folder's first."""
    max_points: Annotated[int, Field(gt=1)] = 20_000
    """Maximum number of proteins to draw; if there are more, a random sample."""


@command("embed plot", __doc__, made_by="plot_embeddings")
def main(
    folder: Annotated[Path, Field(description="Folder of embeddings to plot.")], plot: PlotSection, writer: OutputWriter
) -> None:
    writer.refuse_existing(plot.output)
    # umap-learn is an optional dependency.
    if plot.method == "umap" and find_spec("umap") is None:
        raise ConfigError("--plot.method umap: umap-learn is not installed; run: pip install umap-learn")
    embeddings = open_vectors(folder, plot.name)
    records = len(embeddings)
    if min(records, embeddings.channels) < 2:
        raise DataError(f"{folder}: a map needs at least two proteins and two channels")
    from esmeray.inference.embedding.map import Points, draw, write_page  # here: it loads Matplotlib

    labels = _labels(plot.labels, plot, embeddings) if plot.labels else embeddings.lengths
    chosen_N = np.zeros(records, dtype=bool)
    size = min(plot.max_points, records)
    # RandomState, because NumPy guarantees its draws: every version samples the same proteins.
    chosen_N[np.random.RandomState(SEED).choice(records, size, replace=False)] = True
    # Read block by block, so that memory holds the sample only.
    vectors_PC = np.concatenate(
        [block_nC[chosen_N[start : start + len(block_nC)]] for start, block_nC in embeddings.finite_blocks()]
    )
    xy_P2, axes = _projected(vectors_PC, plot.method)
    ids_P = np.array(embeddings.ids, dtype=object)[chosen_N]
    points = Points(ids_P, embeddings.lengths[chosen_N], labels[chosen_N], xy_P2)
    number = counted(records, "protein{s}")
    drawn = number if size == records else f"a random sample of {size:,} of {number}"
    trained_P, training = in_training(embeddings.folder, embeddings.sequence_keys[chosen_N])
    title = f"{embeddings.name}: {drawn}" + f"; {training}" * (trained_P is not None)
    texts = title, *axes, plot.label_column if plot.labels else "residues"
    with writer.folder(plot.output) as building:
        draw(building / "embeddings.png", points, *texts)
        write_page(building / "embeddings.html", points, *texts)
    unlabelled = size - points.are_labelled.sum()
    print(f"{plot.output}: embeddings.png and embeddings.html with {drawn}, {unlabelled:,} without a label")
    print(training)


def _labels(path: Path, plot: PlotSection, embeddings: Embeddings) -> NDArray:
    """Return (N,) labels from a table: numbers, NaN if missing, or names, empty if missing.

    Raises DataError if the table can't be read, lacks or repeats ids, or has too few ids of the embeddings.
    """
    by_id = labels_by_id(path, plot.label_column, "plot", plot.not_missing)
    labels = labels_of(embeddings.ids, by_id, embeddings.source, path)
    labels_N = np.array([labels.get(record_id, "") for record_id in embeddings.ids])
    # Numeric if all labels are numbers; otherwise every label is a class.
    try:
        return np.where(labels_N == "", "nan", labels_N).astype(float)
    except ValueError:
        return labels_N


def _projected(vectors_PC: Values, method: str) -> tuple[NDArray[np.floating], tuple[str, str]]:
    """Return (P, 2) coordinates, and names of the axes."""
    if method == "umap":
        import umap  # imported here: it compiles for seconds

        return umap.UMAP(random_state=SEED).fit_transform(vectors_PC), ("UMAP 1", "UMAP 2")
    from sklearn.decomposition import PCA

    pca = PCA(2, random_state=SEED)
    xy_P2 = pca.fit_transform(vectors_PC)
    first, second = pca.explained_variance_ratio_
    return xy_P2, (f"PC 1 ({first:.0%} of the variance)", f"PC 2 ({second:.0%})")
