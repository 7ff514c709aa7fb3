"""Measure how well embeddings, or hits of a search, find relatives: proteins with the same label.

Embeddings are compared by cosine similarity, each query with all other proteins. A TSV of hits is the output of 'embed
search' or 'align', best hit of a query first. It needs enough hits, e.g. --align.hits 15000 --align.evalue inf. Labels
may be nested, with dots between their parts: --evaluate.level_names family superfamily fold reads b.82.2.13 as family
b.82.2.13, superfamily b.82.2 and fold b.82.

Sensitivity is the share of a query's relatives that rank before the first false positive, which is a protein of another
group at the last level. Relatives are evaluated by level: the query's family, its superfamily without its family, its
fold without its superfamily. The query counts as a hit in its own family, like in published values. The metrics
sensitivity_of_others, AUC, top_1 and top_5 (a relative among the first hits) leave it out. Each metric is a mean over
the queries with such relatives, with a 95 % bootstrap interval. If 'embed fit' fitted the model to some of the
proteins, their number is printed, and the metrics are printed again without them.

Examples:
  esmeray embed evaluate vectors --evaluate.labels domains.tsv --evaluate.label_column classification \
--evaluate.level_names family superfamily fold
  esmeray embed evaluate hits.tsv --evaluate.labels domains.tsv --evaluate.queries queries.txt \
--evaluate.output hits.json
"""

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from esmeray.common.errors import DataError
from esmeray.common.progress import record_bar
from esmeray.common.statistics import RESAMPLINGS
from esmeray.common.text import counted
from esmeray.dataset.embeddings.reader import open_vectors
from esmeray.dataset.identifiers import match_ids
from esmeray.dataset.labels.values import labels_by_id, labels_of
from esmeray.dataset.table import numbered_lines
from esmeray.dataset.targets import level_ids
from esmeray.inference.index.build import memory_index
from esmeray.inference.retrieval.conformal import chosen
from esmeray.inference.retrieval.metrics import METRICS, in_training, means, query_metrics
from esmeray.tools.grammar import OutputWriter, command
from esmeray.train_config.section import Section


class RetrievalSection(Section):
    """Labels, queries and output file."""

    labels: Path
    """CSV, TSV or Parquet file of labels, with a column id."""
    label_column: str = "label"
    """Name of the column of labels in the file of labels."""
    level_names: list[str] = Field(default=["label"], min_length=1)
    """Names of the levels of labels, closest first. Each further level drops the last part of the label."""
    queries: Path | None = None
    """File of the ids of queries, one per line. Default: all proteins with a label."""
    not_missing: list[str] = Field(default=[])
    """Labels that are names, although tables use them for missing values, e.g. NA (neuraminidase)."""
    output: Path | None = None
    """JSON file to write the metrics to. Default: none."""
    name: str | None = None
    """Output in the folder of embeddings. Default: its first."""


@command("embed evaluate", __doc__, made_by="evaluate_embeddings")
def main(
    vectors: Annotated[Path, Field(description="Folder of embeddings, or TSV of hits.")],
    evaluate: RetrievalSection,
    writer: OutputWriter,
) -> None:
    writer.refuse_file(evaluate.output)
    by_id = labels_by_id(evaluate.labels, evaluate.label_column, "evaluate", evaluate.not_missing)
    index = None if vectors.is_file() else memory_index(open_vectors(vectors, evaluate.name), "cosine")
    # A list of hits does not name all searched proteins, so they are taken from the table of labels.
    ids = list(by_id) if index is None else index.ids(range(index.count))
    labels = labels_of(ids, by_id, vectors, evaluate.labels)
    numbers = {name: number for number, name in enumerate(ids) if name in labels}
    queries = chosen(evaluate.queries, numbers, evaluate.labels)
    groups_NL = level_ids([labels.get(name, "") for name in ids], len(evaluate.level_names))
    ranked = _listed(vectors, numbers, queries) if index is None else index.own_hits(queries, index.count)
    labelled = np.array([*numbers.values()])
    # A list of hits has no sequences to compare with the training set.
    sequences_n2 = np.zeros((len(labelled), 2), np.uint64) if index is None else index.sequences(labelled)
    trained_n, training = in_training(vectors if index is None else index.folder, sequences_n2)
    tables = {"levels": groups_NL}
    if trained_n is not None and not trained_n.all():
        # Proteins that the model was fitted to count neither as queries nor as hits.
        tables["levels_without_training"] = groups_NL.copy()
        tables["levels_without_training"][labelled[trained_n]] = -1
    values = []
    with record_bar("evaluating") as bar:
        for query, hits_K, *_ in ranked:
            values.append([query_metrics(groups, query, hits_K) for groups in tables.values()])
            bar(len(values) / len(queries), len(values))
    print(f"{counted(len(queries), 'quer{ies}')} among {len(numbers):,} with a label", training, sep="\n")
    facts: dict[str, Any] = {"input": str(vectors), "queries": len(queries), "proteins": len(numbers)}
    facts["proteins_in_training"] = None if trained_n is None else int(np.count_nonzero(trained_n))
    for name, values_QLM in zip(tables, zip(*values, strict=True), strict=True):
        print("all:" if name == "levels" else "without training proteins:")
        facts[name] = _reported(values_QLM, evaluate)
    writer.write_json(evaluate.output, facts)


def _reported(values: Sequence[NDArray[np.float64]], evaluate: RetrievalSection) -> dict[str, dict[str, Any]]:
    """Print the metrics of each level, and return them by the level's name."""
    levels = dict(zip(evaluate.level_names, means(values, RESAMPLINGS, seed=0), strict=True))
    print("".join(f"{title:>23}" for title in ["", *METRICS]))
    for level, metrics in levels.items():
        cells = [f"{level} ({metrics['sensitivity_of_others']['queries']})"]
        for metric in metrics.values():
            low, high = metric["interval"] or (math.nan, math.nan)
            cells.append(f"{metric['value']:.3f} ({low:.3f}-{high:.3f})")
        print("".join(f"{cell:>23}" for cell in cells))
    return levels


def _listed(path: Path, numbers: dict[str, int], queries: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """Yield each query with its labelled hits, in the order of the file."""
    # Read the file twice: all its hits may not fit into memory.
    matches = match_ids(chain.from_iterable(_hits(path)), numbers, path, "the proteins with a label")
    rows = {name: numbers[known] for name, known in matches.items()}
    # Keyed by the target: if a pair has several alignments, the first one counts.
    hits: dict[int, dict[int, None]] = {query: {} for query in queries.tolist()}
    for query, target in _hits(path):
        if rows.get(query, -1) in hits and target in rows:
            hits[rows[query]][rows[target]] = None
    for number, own in hits.items():
        yield number, np.array(list(own), dtype=np.int64)


def _hits(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the query and the target of each line."""
    target = 1
    for line, text in numbered_lines(path):
        fields = text.split("\t")
        if line == 1 and "target" in fields:  # 'embed search' has the column rank before the target
            target = fields.index("target")
            continue
        if len(fields) <= target:
            raise DataError(f"{path}, line {line}: a hit needs at least {target + 1} columns, separated by tabs")
        yield fields[0], fields[target]
