"""The exact index equals an exhaustive comparison in fp32."""

from pathlib import Path

import numpy as np
import pytest

from esmeray.inference.index.exact import ExactIndex, exact_arrays
from esmeray.inference.index.metric import prepared, scores
from esmeray.inference.index.parts import IndexManifest, PartEntry, id_arrays

CHANNELS = 48


KINDS = ("near duplicates", "common", "ties", "equal", "huge ranges", "zeros")


def rows_of(kind: str, random: np.random.Generator) -> np.ndarray:
    rows = random.normal(size=(800, CHANNELS))
    match kind:
        case "near duplicates":  # differ in bits beyond bf16's precision, each repeated several times
            repeated = np.repeat(rows[:12], 80, axis=0)
            rows = random.permutation(repeated * (1 + 2.0**-22 * random.integers(-3, 3, size=repeated.shape)))
        case "common":  # a common offset, like nearly all protein embeddings
            rows += 40
        case "ties":
            rows = random.integers(-1, 2, size=(700, CHANNELS)) + np.eye(1, CHANNELS)
        case "equal":
            rows[:] = 1
        case "huge ranges":
            rows *= 10.0 ** random.integers(-12, 12, size=(800, 1))
            rows[::7] *= 10.0 ** random.integers(-25, 1, size=(1, CHANNELS))
        case "zeros":
            rows[100:400] = 0
    return rows


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
@pytest.mark.parametrize("kind", KINDS)
def test_hits_are_those_of_an_exhaustive_comparison_ties_by_row(kind, metric, bf16):
    random = np.random.default_rng(0)
    rows = rows_of(kind, random).astype(np.float32)
    if metric == "cosine":
        rows = rows[np.linalg.norm(rows.astype(np.float64), axis=1) > 0]
    queries = np.concatenate([rows[::60], rows[::90] * 0.5, random.normal(size=(5, CHANNELS))]).astype(np.float32)
    queries = np.concatenate([queries, -queries[:3]])
    cut = 257  # a part ends within a group
    vectors = prepared(metric, rows)
    pieces = [vectors[:cut], vectors[cut:]]
    parts = [
        {**id_arrays([(["p"] * len(piece), np.ones((len(piece), 2), np.uint64))]), **exact_arrays(metric, piece)}
        for piece in pieces
    ]
    entries = [PartEntry(rows=len(piece)) for piece in pieces]
    manifest = IndexManifest(
        kind="exact", metric=metric, output="mean", channels=CHANNELS, made_of=None, model=None, parts=entries
    )
    index = ExactIndex(Path(), manifest, parts, bf16=bf16)
    queries.flags.writeable = False  # like an array of a memory-mapped file
    found, values = index.search(queries, 10)
    for query, hits in zip(prepared(metric, queries), found, strict=True):
        every = scores(metric, vectors, query)
        assert hits.tolist() == np.lexsort((np.arange(len(every)), -every))[:10].tolist()
    alone = [index.search(query[None], 10) for query in queries]
    assert all((hits[0] == row).all() for (hits, _), row in zip(alone, found, strict=True)), "whatever the batch"
    assert np.isfinite(values).all()
