"""Predictions as rows of a CSV, TSV or Parquet file, written part by part.

Columns: ``id``; ``label``, what is predicted in words (names of a multilabel target with the separator between them, a
letter for each residue); and for each class ``probability_NAME``. Of per-residue labels this is one number for each
residue: a list in Parquet, numbers with blanks between them in text, NaN where a residue was cropped. Regression has
``predicted_NAME`` alone. Parquet holds fp32, text six digits.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dataset.batches.cropping import head_length
from dataset.labels.label_space import LabelSpace
from inference.classifier import Predictions


class PredictionWriter(Protocol):
    """A file that is being written."""

    def write(self, ids: Sequence[str], predictions: Predictions) -> None:
        """Append rows."""


@contextmanager
def writing_predictions(path: Path, final_name: str, space: LabelSpace, separator: str) -> Iterator[PredictionWriter]:
    """Open a file for rows of this label space.

    Args:
        path: where to write.
        final_name: tells the format by its suffix.
        space: of the predictions.
        separator: between the names of a multilabel target.
    """
    if final_name.endswith(".parquet"):
        with pq.ParquetWriter(path, _schema(space)) as file:
            yield _Parquet(file, space, separator)
        return
    with path.open("w", encoding="utf-8", newline="") as text:
        yield _Text(text, "\t" if final_name.endswith(".tsv") else ",", space, separator)


def column_names(space: LabelSpace) -> list[str]:
    """As they stand in the file."""
    if space.kind == "regression":
        return ["id", *(f"predicted_{name}" for name in space.names)]
    return ["id", "label", *(f"probability_{name}" for name in space.names)]


class _Text:
    def __init__(self, file: TextIO, delimiter: str, space: LabelSpace, separator: str) -> None:
        self._writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        self._space, self._separator = space, separator
        self._writer.writerow(column_names(space))

    def write(self, ids: Sequence[str], predictions: Predictions) -> None:
        if self._space.kind == "per_residue":
            numbers: list[list[str]] = [
                [" ".join(map(_shown, column)) for column in rows.T.tolist()] for rows in _residue_rows(predictions)
            ]
        else:
            numbers = [list(map(_shown, row)) for row in predictions.probabilities.tolist()]
        words = _words(predictions, self._separator)
        self._writer.writerows([one, *said, *row] for one, said, row in zip(ids, words, numbers, strict=True))


class _Parquet:
    def __init__(self, file: pq.ParquetWriter, space: LabelSpace, separator: str) -> None:
        self._file, self._space, self._separator = file, space, separator

    def write(self, ids: Sequence[str], predictions: Predictions) -> None:
        columns: list[Any] = [list(ids)]
        if self._space.kind != "regression":
            columns.append(predictions.labels(self._separator))
        if self._space.kind == "per_residue":
            rows = _residue_rows(predictions)
            columns += [[one[:, index] for one in rows] for index in range(self._space.num_outputs)]
        else:
            columns += list(predictions.probabilities.T)
        schema = _schema(self._space)
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
        self._file.write_table(pa.table(arrays, schema=schema))


def _schema(space: LabelSpace) -> pa.Schema:
    number = pa.list_(pa.float32()) if space.kind == "per_residue" else pa.float32()
    words = {"id", "label"} if space.kind != "regression" else {"id"}
    names = column_names(space)
    return pa.schema([(name, pa.string() if index < len(words) else number) for index, name in enumerate(names)])


def _words(predictions: Predictions, separator: str) -> list[list[str]]:
    if predictions.label_space.kind == "regression":
        return [[] for _ in range(len(predictions))]
    return [[label] for label in predictions.labels(separator)]


def _residue_rows(predictions: Predictions) -> list[np.ndarray]:
    """(residues, C) of each text, NaN where a residue was cropped."""
    rows = []
    for (start, end), cut in zip(predictions.spans(), predictions.cropped.tolist(), strict=True):
        head = start + head_length(end - start, predictions.crop)
        gap = np.full((cut, predictions.probabilities.shape[1]), np.nan, dtype=np.float32)
        kept = predictions.probabilities
        rows.append(np.concatenate((kept[start:head], gap, kept[head:end])) if cut else kept[start:end])
    return rows


def _shown(value: float) -> str:
    return f"{value:.6g}"
