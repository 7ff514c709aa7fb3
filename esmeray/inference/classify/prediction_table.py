"""Write predictions as rows of a CSV, TSV or Parquet file, part by part.

Columns:

- ``id``
- ``label``: the prediction in words: names of a multilabel target joined by the separator, or a letter per residue
- ``probability_NAME`` per class; regression has ``predicted_NAME`` instead, and no label
- with a coverage, ``set``: names in the conformal set, and ``set_size``, their number; regression has ``lower_NAME``
  and ``upper_NAME``

For per-residue labels a probability is a list in Parquet and numbers separated by blanks in text, NaN for a cropped
residue. A set is the letters of each residue, separated by blanks, and its size a list. Parquet holds fp32, text six
digits.

Shape legend: N texts, C classes or numbers.
"""

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from esmeray.common.progress import record_bar
from esmeray.dataset.labels.label_space import LabelSpace
from esmeray.inference.classifier import UNSEEN_RESIDUE, ClassifierPipeline, Predictions
from esmeray.inference.classify.labelled import TextPart

Writer = Callable[[Sequence[str], Predictions], None]
"""Function that appends the rows of these ids."""


@contextmanager
def writing_predictions(
    path: Path, final_name: str, space: LabelSpace, separator: str, *, with_sets: bool = False
) -> Iterator[Writer]:
    """Open a file for predictions in this label space. The suffix of ``final_name`` chooses the format.

    ``separator`` joins the names of a multilabel target, or of a set.
    """
    schema = _schema(space, with_sets)
    if final_name.endswith(".parquet"):  # by the final name: the file that is written has a temporary one
        with pq.ParquetWriter(path, schema) as file:
            yield lambda ids, predictions: file.write_table(
                pa.Table.from_pydict(prediction_columns(ids, predictions, separator), schema)
            )
        return
    with path.open("w", encoding="utf-8", newline="") as text:
        rows = csv.writer(text, delimiter="\t" if final_name.endswith(".tsv") else ",", lineterminator="\n")
        rows.writerow(schema.names)
        yield lambda ids, predictions: rows.writerows(
            zip(*map(_words, prediction_columns(ids, predictions, separator).values()), strict=True)
        )


def predict_all(
    pipeline: ClassifierPipeline, chunks: Iterable[TextPart], write: Writer
) -> tuple[int, int, Counter[str]]:
    """Read, predict and write chunk by chunk.

    Returns the number of records, the number of cropped records, and the number of unknown tokens by letter.
    """
    records = cropped = 0
    unknown: Counter[str] = Counter()
    before = 0.0
    with record_bar("predicting") as bar:
        for ids, texts, share in chunks:
            # Default arguments capture this chunk's values, because the loop changes them.
            def show(done: int, total: int, first=before, width=share - before, earlier=records) -> None:
                bar(first + width * done / total, earlier + done)

            predictions = pipeline.predict_clean(texts, progress=show)
            write(ids, predictions)
            records += len(ids)
            cropped += int((predictions.cropped > 0).sum())
            unknown += pipeline.model.facts.unknown.counts_of(texts)[0]
            before = share
    return records, cropped, unknown


def _schema(space: LabelSpace, with_sets: bool) -> pa.Schema:
    numbers = pa.list_(pa.float32()) if space.kind == "per_residue" else pa.float32()
    words, prefix = (["id"], "predicted") if space.kind == "regression" else (["id", "label"], "probability")
    fields = [(name, pa.string()) for name in words] + [(f"{prefix}_{name}", numbers) for name in space.names]
    if with_sets and space.kind == "regression":
        fields += [(f"{end}_{name}", numbers) for end in ("lower", "upper") for name in space.names]
    elif with_sets:
        sizes = pa.list_(pa.int32()) if space.kind == "per_residue" else pa.int32()
        fields += [("set", pa.string()), ("set_size", sizes)]
    return pa.schema(fields)


def prediction_columns(ids: Sequence[str], predictions: Predictions, separator: str) -> dict[str, Any]:
    """Columns of N values by name: strings, numbers, or arrays of residue values."""
    columns: list[Any] = [list(ids)]
    if predictions.label_space.kind != "regression":
        columns.append(predictions.labels(separator))
    if predictions.lengths is None:
        columns += list(predictions.probabilities.T)
    else:
        texts = predictions.of_whole_texts(predictions.probabilities, np.nan)
        columns += [[text[:, index] for text in texts] for index in range(predictions.label_space.num_outputs)]
    if predictions.thresholds is not None:
        columns += _set_columns(predictions, predictions.thresholds, separator)
    names = _schema(predictions.label_space, predictions.thresholds is not None).names
    return dict(zip(names, columns, strict=True))


def _set_columns(predictions: Predictions, thresholds: NDArray[np.float64], separator: str) -> list[Any]:
    if predictions.label_space.kind == "regression":
        ends = (predictions.probabilities + sign * thresholds for sign in (-1, 1))
        return [values_N for values_NC in ends for values_N in values_NC.T]
    sets = predictions.sets()
    sizes = np.array([*map(len, sets)], dtype=np.int32)
    if predictions.lengths is None:
        return [[*map(separator.join, sets)], sizes]
    # A sign for empty sets, so that the number of words equals the number of residues.
    letters = predictions.of_whole_texts(np.array(["".join(names) or "-" for names in sets]), UNSEEN_RESIDUE)
    return [[*map(" ".join, letters)], predictions.of_whole_texts(sizes, 0)]


def _words(column: Any) -> list[str]:
    if isinstance(column, np.ndarray):
        return [f"{value:.6g}" for value in column.tolist()]
    return [value if isinstance(value, str) else " ".join(_words(value)) for value in column]
