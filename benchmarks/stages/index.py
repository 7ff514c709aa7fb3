"""Indexes of vectors with 320 channels, compared with faiss' Flat and HNSW, on one core.

The vectors are the mean vectors of proteins from an ESM-2 with random weights, each many times, with noise of 0.03 to 1
standard deviations of a channel, as mutants differ. Queries are 512 of the vectors with a little noise. All cores build
an index; each index gets all queries at once and answers with one thread. The rate is the median of three rounds in
turns. Recall@10 is relative to the exact index. Memory is what an index holds or maps to answer, including pages that
the system may drop. HNSW is left out above 100,000 vectors, since building it takes a quarter of an hour. Flat, which
holds its vectors twice while it is built, is left out if there is not enough memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import faiss
import numpy as np
import psutil
import torch

from benchmarks.harness.inputs import read_proteins
from benchmarks.harness.stage import Row, Setting, Stage, WrongWorkError
from esmeray.common.processor import cpu_computes_bf16, usable_cpus
from esmeray.common.timing import measure, timed
from esmeray.dataset.embeddings.formats.base import Block, Source, Values
from esmeray.dataset.embeddings.formats.registry import FORMATS
from esmeray.dataset.embeddings.manifest import EmbeddingsManifest, OutputManifest, ranges, write_index, write_manifest
from esmeray.inference.index.build import IndexSection, make_index
from esmeray.inference.index.search import open_index
from esmeray.inference.models.opening import open_model

CHANNELS = 320
QUERIES = 512
HITS = 10
EMBEDDED = 2000
RESIDUES = 64
"""Residues that are embedded of each protein."""
QUICK_VECTORS = 2000
MAX_HNSW = 100_000


@dataclass(frozen=True)
class Built:
    """An index: its search, the seconds that it took to build, and its bytes on disk and in memory."""

    search: Callable[[Values], Any]
    build_s: float
    disk: int
    memory: int


def _rows(setting: Setting) -> Iterator[Row]:
    random = np.random.default_rng(0)
    proteins = _protein_vectors(setting)
    for number in (QUICK_VECTORS,) if setting.quick else setting.vectors:
        folder = setting.folder / f"vectors-{number}"
        vectors = write_vectors(folder, number, partial(_mutants, proteins, random))
        spread = vectors[:1000].std(axis=0)
        queries = vectors[np.sort(random.choice(number, QUERIES))]
        queries = queries + (0.1 * spread * random.standard_normal(queries.shape)).astype(np.float32)
        yield from _measured(setting, folder, vectors, queries)


def _protein_vectors(setting: Setting) -> Values:
    texts = [text[:RESIDUES] for text in read_proteins(setting)[: 50 if setting.quick else EMBEDDED]]
    return np.asarray(open_model("esm2_t6_8M", device="cpu", random_weights=True).embed(texts))


def _mutants(proteins: Values, random: np.random.Generator, start: int, stop: int) -> Values:
    vectors = proteins[np.arange(start, stop) % len(proteins)]
    # Copies with few or many substitutions, like mutants: most copies of a protein are not its nearest neighbours.
    levels = 10 ** random.uniform(-1.5, 0, size=(stop - start, 1)).astype(np.float32)
    return vectors + levels * proteins.std(axis=0) * random.standard_normal(vectors.shape, dtype=np.float32)


def write_vectors(folder: Path, number: int, vectors: Callable[[int, int], Values]) -> Values:
    """Write a folder of embeddings as a job does, with the rows of a function; return them memory-mapped."""
    folder.mkdir(parents=True)

    # In blocks: ten million vectors do not fit into memory twice.
    def blocks(rows: int) -> Iterator[Block]:
        for start, stop in ranges(number, rows):
            yield Block([], np.empty(0, np.int64), vectors(start, stop))

    output = OutputManifest(description="mean", per="protein", channels=CHANNELS, dtype="fp32", format="npy")
    output = FORMATS["npy"].merge(folder, "mean", output, Source(number, blocks))
    numbers = np.arange(number)
    columns = {"id": [f"p{row}" for row in numbers], "length": numbers + 1, "sequence": numbers}
    write_index(folder, [{**columns, "hash": numbers + 1, "second_hash": numbers + 1}])
    write_manifest(folder, EmbeddingsManifest(num_records=number, num_sequences=number, outputs={"mean": output}))
    return np.load(folder / "mean.npy", mmap_mode="r")


def _measured(setting: Setting, folder: Path, vectors: Values, queries: Values) -> Iterator[Row]:
    """Yield a row for each index of the same vectors."""
    indexes = {"exact": _ours(folder, "exact"), "compressed": _ours(folder, "compressed"), **_peers(vectors)}
    searches = {name: partial(timed, partial(index.search, queries)) for name, index in indexes.items()}
    _set_threads(1)
    rounds = measure(searches, 1 if setting.quick else 3, setting.note)
    _set_threads(usable_cpus())
    # The hits are the same in each round.
    hits_QK = {name: samples[0][0].tolist() for name, samples in rounds.items()}
    for name, index in indexes.items():
        pairs = zip(hits_QK["exact"], hits_QK[name], strict=True)
        recall = sum(len({*exact} & {*hits}) for exact, hits in pairs) / (HITS * QUERIES)
        # Flat rounds differently, so it may choose others among equally near vectors.
        if name == "faiss Flat" and recall < 0.98:
            raise WrongWorkError(f"exact and {name} share {recall} of their hits")
        yield {
            "vectors": len(vectors),
            "index": name,
            "build s": round(index.build_s, 1),
            "disk bytes per vector": round(index.disk / len(vectors)),
            "memory bytes per vector": round(index.memory / len(vectors), 1),
            "queries/s": round(QUERIES / median(seconds for _, seconds in rounds[name])),
            "recall@10": round(recall, 4),
        }


def _ours(folder: Path, kind: str) -> Built:
    output = folder.with_name(f"{folder.name}.{kind}")
    section = IndexSection.model_validate({"output": output, "kind": kind})
    _, build_s = timed(partial(make_index, [folder], section))
    index = open_index(output)
    sizes = {path: path.stat().st_size for path in output.rglob("*") if path.is_file()}
    if kind == "exact":  # the filter alone: few vectors are scored again
        memory = index.count * CHANNELS * (2 if cpu_computes_bf16() else 4)
    else:
        memory = sum(size for path, size in sizes.items() if path.suffix in (".lists", ".faiss"))
    return Built(lambda queries: index.search(queries, HITS)[0], build_s, sum(sizes.values()), memory)


def _peers(vectors: Values) -> dict[str, Built]:
    if 2 * vectors.nbytes > psutil.virtual_memory().available:
        return {}
    units = _unit(vectors)
    peers = {"faiss Flat": _faiss(faiss.IndexFlatIP(CHANNELS), units, 4 * CHANNELS)}
    if len(vectors) <= MAX_HNSW:
        hnsw = faiss.IndexHNSWFlat(CHANNELS, 32, faiss.METRIC_INNER_PRODUCT)
        hnsw.hnsw.efSearch = 64
        # The lowest level has 64 neighbours of 4 bytes per vector, all levels above about 2.
        peers["faiss HNSW32, efSearch 64"] = _faiss(hnsw, units, 4 * CHANNELS + 4 * 66)
    return peers


def _faiss(index: Any, units: Values, bytes_per_vector: int) -> Built:
    _, build_s = timed(partial(index.add, units))
    size = len(units) * bytes_per_vector
    return Built(lambda queries: index.search(_unit(queries), HITS)[1], build_s, size, size)


def _unit(vectors: Values) -> Values:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _set_threads(number: int) -> None:
    torch.set_num_threads(number)
    faiss.omp_set_num_threads(number)


STAGE = Stage(
    name="index",
    summary="indexes of vectors on disk, exact and compressed, compared with faiss' Flat and HNSW",
    rows=_rows,
    packages=("faiss",),
    distributions=("faiss-cpu", "torch", "numpy"),
)
