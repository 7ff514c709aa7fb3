"""Find the nearest neighbours of proteins by their embeddings, with faiss.

Writes a TSV: query, rank, target, and score: the cosine, the dot product, or the L2 distance. Without queries each
protein of the database is searched in the rest of it. The index is in memory: 4 bytes a value. 'exact' compares all
pairs; 'ivf' compares each query with the targets in the ivf_probes nearest of ivf_lists clusters.

Examples:
  esmeray embed search swissprot --search.queries proteome --search.output hits.tsv
  esmeray embed search swissprot --search.output neighbours.tsv --search.top_k 50 --search.index ivf \
--search.ivf_probes 32 --search.name mean
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from esmeray.common.errors import ConfigError
from esmeray.common.progress import record_bar
from esmeray.common.text import counted
from esmeray.dataset.embeddings.reader import Embeddings, Values, open_vectors
from esmeray.tools.grammar import Made, command
from esmeray.train_config.section import PositiveInt, Section


class SearchSection(Section):
    """Queries, and the kind of search."""

    queries: Path | None = None
    """Folder of embeddings to search with. Default: the database, without hits of itself."""
    output: Path
    """TSV file of the results to write."""
    top_k: PositiveInt = 10
    """Hits of each query, at most."""
    metric: Literal["cosine", "dot", "l2"] = "cosine"
    """Measure by which proteins are near."""
    index: Literal["exact", "ivf"] = "exact"
    """exact: compare all pairs; ivf: compare each query with the nearest clusters."""
    ivf_lists: PositiveInt | None = None
    """Clusters of the index. Default: 4 times the square root of the proteins, at most one for 39."""
    ivf_probes: PositiveInt = 16
    """Clusters that are searched for a query."""
    name: str | None = None
    """Output of the folders. Default: their first."""


@command("embed search", __doc__, made_by="search")
def main(
    database: Annotated[Path, Field(description="Folder of embeddings to search in.")],
    search: SearchSection,
    made: Made,
) -> None:
    made.refuse_file(search.output)
    searched = open_vectors(database, search.name)
    queries = open_vectors(search.queries, search.name) if search.queries else searched
    queries.refuse_other_space(searched)
    start_s = time.perf_counter()
    hits = 0
    index = _index(searched, search)
    own = queries is searched
    with (
        made.file(search.output) as building,
        building.open("w", encoding="utf-8") as file,
        record_bar("searching") as bar,
    ):
        file.write("query\trank\ttarget\tscore\n")
        for start, block_nC in _vectors(queries, search.metric, rows=1024):
            # One more where each protein finds itself, which is left out below.
            scores_nk, targets_nk = index.search(block_nC, search.top_k + own)
            if search.metric == "l2":
                scores_nk = np.sqrt(np.maximum(scores_nk, 0))  # faiss has squares
            for query, row in enumerate(zip(targets_nk.tolist(), scores_nk.tolist(), strict=True), start):
                # -1: faiss has no more.
                nearest = [(t, score) for t, score in zip(*row, strict=True) if t >= 0 and not (own and t == query)]
                for rank, (target, score) in enumerate(nearest[: search.top_k], 1):
                    file.write(f"{queries.ids[query]}\t{rank}\t{searched.ids[target]}\t{score:.6g}\n")
                    hits += 1
            bar((start + len(block_nC)) / len(queries), start + len(block_nC))
    proteins = f"{counted(len(queries), 'protein{s}')} searched in {len(searched):,}"
    kind = f"{search.metric}, {search.index}, {time.perf_counter() - start_s:.1f} s"
    print(f"{search.output}: {counted(hits, 'hit{s}')} of {proteins} ({kind})")


def _vectors(embeddings: Embeddings, metric: str, rows: int = 16_384) -> Iterator[tuple[int, Values]]:
    """Blocks of vectors, of length 1 for cosines."""
    for start, block_nC in embeddings.finite_blocks(rows):
        if metric == "cosine":
            norms_n = np.linalg.norm(block_nC, axis=1)
            embeddings.refuse(start, norms_n == 0, "is a vector of zeros, which has no cosine,")
            block_nC = block_nC / norms_n[:, None]  # faiss has inner products alone, which are then cosines
        yield start, np.ascontiguousarray(block_nC)  # faiss reads the memory as it lies


def _index(database: Embeddings, section: SearchSection) -> Any:
    import faiss

    records, metric = len(database), section.metric
    # 4 sqrt(N) is faiss's advice; fewer where a cluster would have less than the 39 vectors that it asks for.
    lists = section.ivf_lists or max(1, min(int(4 * records**0.5), records // 39))
    if lists > records:
        raise ConfigError(f"--search.ivf_lists {lists}: more than the {records:,} proteins of {database.source}")
    kind = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
    index: Any = faiss.index_factory(
        database.channels, "Flat" if section.index == "exact" else f"IVF{lists},Flat", kind
    )
    if section.index == "ivf":
        index.nprobe = section.ivf_probes
        # A sample of 64 vectors a cluster, above the 39 for which faiss asks: the whole need not be in memory twice.
        step = max(1, records // (64 * lists))
        index.train(np.concatenate([block_nC[::step] for _, block_nC in _vectors(database, metric)]))
    with record_bar("indexing") as bar:
        for start, block_nC in _vectors(database, metric):
            index.add(block_nC)
            bar((start + len(block_nC)) / records, start + len(block_nC))
    return index
