"""Align proteins with all of a store, and write the best hits of each as BLAST does.

Scores are exact: Smith-Waterman with affine gaps on all cores, or on a GPU. A gap of n residues costs gap_open plus n
times gap_extend, as in BLAST. Columns are those of BLAST's output format 6, E-values and bit scores those of blastp
without composition-based statistics. A prefilter aligns fewer records, and loses hits. The same command resumes a
search that was ended.

Examples:
  esmeray align --align.queries proteins.fasta --align.store proteins.store --align.output hits.tsv
  esmeray align --align.queries proteins.fasta --align.store proteins.store --align.output close.tsv --align.hits 50 \
--align.evalue 1e-3 --align.matrix BLOSUM80
  esmeray align --align.queries proteins.fasta --align.store proteins.store --align.output fast.tsv \
--align.prefilter kmer --align.candidates 500 --align.header true
  esmeray align --align.queries proteins.fasta --align.store proteins.store --align.output near.tsv \
--align.prefilter embedding --align.query_embeddings embeddings --align.store_embeddings embeddings
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from esmeray.common.errors import ConfigError
from esmeray.common.progress import record_bar
from esmeray.common.publishing import made_file, refuse_file
from esmeray.common.text import counted
from esmeray.dataset.embeddings.manifest import read_manifest
from esmeray.dataset.store.conversion import job_store
from esmeray.dataset.store.reader import Store
from esmeray.run_folder.job import Journal, accept, journal, unfinished
from esmeray.tools.grammar import Overwriting, parse
from esmeray.train_config.command_schema import AlignSection, AlignSettings

if TYPE_CHECKING:
    from esmeray.alignment.prefilter import EmbeddingNeighbours, SharedWords
    from esmeray.alignment.scoring import Scoring
    from esmeray.alignment.search import Search

MADE_BY = "align"


def main(argv: list[str]) -> int:
    flags, settings = parse(argv, "align", __doc__, Overwriting, AlignSettings)
    arguments = settings.align
    made = (arguments.output, MADE_BY, flags.overwrite)
    refuse_file(*made)
    embeddings = [arguments.query_embeddings, arguments.store_embeddings]
    if {arguments.prefilter == "embedding"} != {folder is not None for folder in embeddings}:
        raise ConfigError("align.prefilter: embedding takes query_embeddings and store_embeddings, and no other does")
    vectors = [read_manifest(folder).model_dump() for folder in embeddings if folder]
    if arguments.device == "cuda" and arguments.prefilter != "none":
        raise ConfigError("--align.device cuda scores all records; give --align.prefilter none")
    store = Store(arguments.store)
    from esmeray.alignment.scoring import scoring
    from esmeray.alignment.search import HEADER, Search

    by = scoring(arguments.matrix, arguments.gap_open, arguments.gap_extend)
    if by.statistics is None and arguments.evalue < math.inf:
        raise ConfigError("BLAST has no E-values for this matrix with these gap penalties; give --align.evalue inf")
    start_s = time.perf_counter()
    with unfinished(arguments.output, MADE_BY) as folder:
        queries = job_store([arguments.queries], settings.data.ingest, folder)
        job = {
            **arguments.model_dump(include={"hits", "prefilter", "candidates"}),
            "evalue": str(arguments.evalue),
            "queries": queries.checksum,
            "store": store.checksum,
            "matrix": by.scores.tolist(),
            "gap penalties": [by.gap_open, by.gap_extend],
            "embeddings": vectors,
        }
        accept(folder, job)
        with journal(folder) as kept:
            scores = _on_gpu(store, by) if arguments.device == "cuda" else None
            search = Search(store, by, threads=arguments.threads, scores=scores)
            _align(search, queries, arguments, kept)
        with made_file(*made) as building, building.open("w", encoding="utf-8") as file:
            if arguments.header:
                file.write(f"{HEADER}\n")
            hits = 0
            for line in kept.lines():
                file.write(line)
                hits += 1
    aligned = f"{counted(len(queries), 'protein{s}')} with {len(store):,}"
    print(f"{arguments.output}: {counted(hits, 'hit{s}')} of {aligned} ({time.perf_counter() - start_s:.1f} s)")
    return 0


def _align(search: Search, queries: Store, arguments: AlignSection, kept: Journal) -> None:
    prefilter = _prefilter(arguments, search.store) if kept.done < len(queries) else None
    with record_bar("aligning") as bar:
        for number in range(kept.done, len(queries)):
            name, query = queries.id(number), queries.sequence(number).tobytes()
            records = prefilter(name, query, arguments.candidates) if prefilter else None
            hits = search.hits(query, arguments.hits, arguments.evalue, records)
            kept.add(search.row(name, query, hit) for hit in hits)
            bar(kept.done / len(queries), kept.done)


def _prefilter(arguments: AlignSection, store: Store) -> EmbeddingNeighbours | SharedWords | None:
    from esmeray.alignment.prefilter import EmbeddingNeighbours, SharedWords

    if arguments.query_embeddings and arguments.store_embeddings:
        return EmbeddingNeighbours(store, arguments.store_embeddings, arguments.query_embeddings)
    return SharedWords(store) if arguments.prefilter == "kmer" else None


def _on_gpu(store: Store, by: Scoring) -> Any:
    """Scores of a query with all of the store, computed on a GPU."""
    import torch

    from esmeray.model.kernels.smith_waterman import SmithWaterman

    if not torch.cuda.is_available():
        raise ConfigError("--align.device cuda: no GPU is seen; see esmeray profile gpu")
    sequences = (by.codes[store.sequence(record)] for record in range(len(store)))
    align = SmithWaterman(sequences, by.scores, by.first, by.gap_extend, "cuda")
    return lambda query: align(by.codes[list(query)])
