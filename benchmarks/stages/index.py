"""Indexes of vectors of 320 channels beside faiss' Flat and HNSW (and usearch, where it is installed), on one core.

Vectors are of two kinds: synthetic families of 20, which are easy, and the mean vectors of proteins by an ESM-2 of
random weights, each many times with noise of 0.03 to 1 of what channels vary by, as mutants differ. Queries are 512 of
the vectors with a little noise. Indexes are built by all cores; queries are given to every index at once, and answered
by one thread: the rate is the median of three rounds in turns. Recall@10 is of what the exact index finds. Memory is
what an index holds or maps to answer, with the pages that the system may drop; that of building, what a process has
beyond its files. Of more than 100,000 vectors HNSW is left out, since building it takes a quarter of an hour, and the
easy kind; Flat, which holds its vectors twice while it takes them, where memory has no room for that.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from benchmarks.harness.proteins import read_proteins
from benchmarks.harness.stage import Row, Setting, Stage, WrongWorkError
from benchmarks.programs.processes import status_bytes
from esmeray.common.timing import measure, timed
from esmeray.dataset.embeddings.formats.base import Block, Source, Values
from esmeray.dataset.embeddings.formats.registry import FORMATS
from esmeray.dataset.embeddings.manifest import EmbeddingsManifest, OutputManifest, ranges, write_index, write_manifest

CHANNELS = 320
QUERIES = 512
HITS = 10
EMBEDDED = 2000
RESIDUES = 64
"""Of each protein that is embedded."""
FEW = 100_000


@dataclass(frozen=True)
class Built:
    """An index that is built: what answers, seconds of building, bytes on disk and in memory."""

    search: Callable[[Values], Any]
    build_s: float
    disk: int
    memory: int
    building_bytes: int | None = None


def _rows(setting: Setting) -> Iterator[Row]:
    random = np.random.default_rng(0)
    proteins = _protein_vectors(setting)
    for number in (2000,) if setting.quick else setting.vectors:
        for kind in ("families", "proteins") if number <= FEW else ("proteins",):
            setting.note(f"{number:,} {kind}")
            # Twenty of a family follow each other; copies of a protein lie far apart.
            centers = random.standard_normal((-(-number // 20), CHANNELS), dtype=np.float32)
            near = partial(_families, centers) if kind == "families" else partial(_mutants, proteins)
            folder = setting.folder / f"{kind}-{number}"
            vectors = write_vectors(folder, number, partial(near, random))
            spread = vectors[:1000].std(axis=0)
            queries = vectors[np.sort(random.choice(number, QUERIES))]
            queries = queries + (0.1 * spread * random.standard_normal(queries.shape)).astype(np.float32)
            yield from _measured(setting, kind, folder, vectors, queries)


def _families(centers: Values, random: np.random.Generator, start: int, stop: int) -> Values:
    vectors = centers[np.arange(start, stop) // 20]
    return vectors + 0.6 * random.standard_normal(vectors.shape, dtype=np.float32)


def _mutants(proteins: Values, random: np.random.Generator, start: int, stop: int) -> Values:
    vectors = proteins[np.arange(start, stop) % len(proteins)]
    # As mutants have few or many substitutions: most of a protein's copies are not its nearest.
    levels = 10 ** random.uniform(-1.5, 0, size=(stop - start, 1)).astype(np.float32)
    return vectors + levels * proteins.std(axis=0) * random.standard_normal(vectors.shape, dtype=np.float32)


def _protein_vectors(setting: Setting) -> Values:
    from esmeray.inference.models.opening import open_model

    setting.note("embedding proteins")
    texts = read_proteins(setting.fasta).sequences[: 50 if setting.quick else EMBEDDED]
    model = open_model("esm2_t6_8M", device="cpu", random_weights=True)
    return np.asarray(model.embed([text[:RESIDUES] for text in texts]))


def write_vectors(folder: Path, number: int, vectors: Callable[[int, int], Values]) -> Values:
    """A folder of embeddings as a job makes it, whose rows a function gives; them, memory-mapped."""
    folder.mkdir(parents=True)

    # In blocks: ten million do not fit into memory twice.
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


def _measured(setting: Setting, kind: str, folder: Path, vectors: Values, queries: Values) -> Iterator[Row]:
    """A row for each index of the same vectors."""
    contenders = {"exact": _ours(folder, "exact"), "compressed": _ours(folder, "compressed")}
    contenders |= _peers(vectors)
    searches = {name: partial(timed, partial(contender.search, queries)) for name, contender in contenders.items()}
    with _one_thread():
        rounds = measure(searches, 1 if setting.quick else 3, setting.note)
    # The same in each round.
    rows_QK = {name: samples[0][0].tolist() for name, samples in rounds.items()}
    for name, contender in contenders.items():
        pairs = zip(rows_QK["exact"], rows_QK[name], strict=True)
        recall = sum(len({*wanted} & {*rows}) for wanted, rows in pairs) / (HITS * QUERIES)
        # Flat rounds otherwise: of rows that are as near, it may name others.
        if name == "faiss Flat" and recall < 0.98:
            raise WrongWorkError(f"exact and {name} share {recall} of their hits")
        yield {
            "vectors": f"{len(vectors):,} {kind}",
            "index": name,
            "build s": round(contender.build_s, 1),
            "building GB": None if contender.building_bytes is None else round(contender.building_bytes / 1e9, 2),
            "disk bytes a vector": round(contender.disk / len(vectors)),
            "memory bytes a vector": round(contender.memory / len(vectors), 1),
            "queries/s": round(QUERIES / median(seconds for _, seconds in rounds[name])),
            "recall@10": round(recall, 4),
        }


def _ours(folder: Path, kind: str) -> Built:
    from esmeray.common.processor import cpu_computes_bf16
    from esmeray.inference.index.build import make_index
    from esmeray.inference.index.opening import open_index
    from esmeray.inference.index.section import IndexSection

    output = folder.with_name(f"{folder.name}.{kind}")
    with _anonymous_memory() as peak:
        section = IndexSection.model_validate({"output": output, "kind": kind})
        _, build_s = timed(partial(make_index, [folder], section))
    index = open_index(output)
    sizes = {path: path.stat().st_size for path in output.rglob("*") if path.is_file()}
    if kind == "exact":  # the filter alone: of what is scored again, little
        memory = index.count * CHANNELS * (2 if cpu_computes_bf16() else 4)
    else:
        memory = sum(size for path, size in sizes.items() if path.suffix in (".lists", ".faiss"))
    return Built(
        lambda queries: index.search(queries, HITS)[0], build_s, sum(sizes.values()), memory, peak[-1] - peak[0]
    )


def _peers(vectors: Values) -> dict[str, Built]:
    import faiss

    peers: dict[str, Built] = {}
    number = len(vectors)
    if 2 * vectors.nbytes > psutil.virtual_memory().available:
        return peers
    kinds = {"faiss Flat": "Flat", "faiss HNSW32, efSearch 64": "HNSW32"}
    if number > FEW:
        kinds.popitem()
    units = _unit(vectors)
    for name, factory in kinds.items():
        index: Any = faiss.index_factory(CHANNELS, factory, faiss.METRIC_INNER_PRODUCT)
        _, build_s = timed(partial(index.add, units))
        if factory != "Flat":
            index.hnsw.efSearch = 64
        # Twice 32 neighbours of 4 bytes in the lowest level, and about as many more in all levels above.
        memory = number * (4 * CHANNELS + (0 if factory == "Flat" else 4 * 66))
        peers[name] = Built(partial(_answer, index), build_s, memory, memory)
    if find_spec("usearch") and number <= FEW:
        from usearch.index import Index

        usearch = Index(ndim=CHANNELS, metric="ip")
        _, build_s = timed(partial(usearch.add, np.arange(number), units))
        peers["usearch"] = Built(
            lambda queries: usearch.search(_unit(queries), HITS, threads=1).keys.astype(np.int64),
            build_s,
            usearch.serialized_length,
            usearch.memory_usage,
        )
    return peers


def _answer(index: Any, queries: Values) -> Any:
    return index.search(_unit(queries), HITS)[1]


def _unit(vectors: Values) -> Values:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


@contextmanager
def _one_thread() -> Iterator[None]:
    import faiss
    import torch

    before = torch.get_num_threads(), faiss.omp_get_max_threads()
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    yield
    torch.set_num_threads(before[0])
    faiss.omp_set_num_threads(before[1])


@contextmanager
def _anonymous_memory() -> Iterator[list[int]]:
    """Bytes of this process that no file has: before a block, and the most within it."""
    values = [status_bytes("RssAnon")] * 2
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            values[-1] = max(values[-1], status_bytes("RssAnon"))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield values
    ended.set()
    thread.join()


STAGE = Stage(
    name="index",
    summary="indexes of vectors on disk, exact and compressed, beside faiss' Flat and HNSW",
    cases=_rows,
    comparisons=(),
    packages=("faiss",),
    distributions=("faiss-cpu", "torch", "numpy"),
)
