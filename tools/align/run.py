"""Align proteins with all of a store, and write the best hits of each as BLAST does.

Scores are exact: Smith-Waterman with affine gaps on all cores, or on a GPU. A gap of n residues costs --gap-open plus n
times --gap-extend, as in BLAST. Columns are those of BLAST's output format 6, E-values and bit scores those of blastp
without composition-based statistics. A prefilter aligns fewer records, and loses hits. The same command resumes a
search that was ended.

Examples:
  esmeray align proteins.fasta proteins.store --output hits.tsv
  esmeray align proteins.fasta proteins.store --output close.tsv --hits 50 --evalue 1e-3 --matrix BLOSUM80
  esmeray align proteins.fasta proteins.store --output fast.tsv --prefilter kmer --candidates 500 --header
  esmeray align proteins.fasta proteins.store --output near.tsv --prefilter embedding \
--query-embeddings embeddings --store-embeddings embeddings
"""

from __future__ import annotations

import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from pydantic import Field

from common.arguments import ToolArguments, parse
from common.errors import ConfigError
from common.progress import record_bar
from common.publishing import made_file, refuse_file
from common.text import counted
from dataset.embeddings.manifest import read_manifest
from dataset.store.conversion import open_store
from dataset.store.reader import Store
from run_folder.job import accept, unfinished
from run_folder.journal import Journal, journal
from train_config.schema import IngestSection

if TYPE_CHECKING:
    from alignment.prefilter import EmbeddingNeighbours, SharedWords
    from alignment.scoring import Scoring
    from alignment.search import Search

MADE_BY = "align"


class Arguments(ToolArguments):
    """Queries, store, scoring and what to keep."""

    queries: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="QUERIES")] = Field(
        description="FASTA file, folder or quoted glob, or a store."
    )
    store: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="STORE")] = Field(
        description="Store of proteins to search in."
    )
    output: Path = Field(description="TSV file to write.")
    hits: int = Field(10, gt=0, description="Hits of each query, at most.")
    evalue: float = Field(10.0, gt=0, description="Largest E-value of a hit; inf keeps all.")
    matrix: str = Field("BLOSUM62", description="BLOSUM45, 50, 62 or 80, PAM250, or a file in NCBI's format.")
    gap_open: int | None = Field(None, ge=0, le=1000, description="Penalty of a gap. Default: BLAST's for the matrix.")
    gap_extend: int | None = Field(
        None, gt=0, le=1000, description="Penalty of each residue of a gap. Default: BLAST's."
    )
    prefilter: Literal["none", "kmer", "embedding"] = Field(
        "none", description="Align all records, those that share words of four residues, or those of near embeddings."
    )
    candidates: int = Field(1000, gt=0, description="Records that a prefilter leaves to each query.")
    query_embeddings: Path | None = Field(
        None, description="Folder of embeddings of the queries, one vector a protein."
    )
    store_embeddings: Path | None = Field(None, description="Folder of embeddings of the store, one vector a protein.")
    header: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Name the columns in a first line."
    )
    threads: int | None = Field(None, gt=0, description="Default: the cores that this process may use.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Device that computes scores of all records.")
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace the file if this tool made it and nobody changed it since."
    )
    ingest: Annotated[IngestSection, tyro.conf.arg(name="data.ingest")] = IngestSection()


def main(argv: list[str]) -> int:
    """Read, align, write."""
    arguments = parse(Arguments, argv, "align", __doc__)
    made = (arguments.output, MADE_BY, arguments.overwrite)
    refuse_file(*made)
    embeddings = [arguments.query_embeddings, arguments.store_embeddings]
    if (arguments.prefilter == "embedding") != all(embeddings) or (any(embeddings) and not all(embeddings)):
        raise ConfigError("--prefilter embedding takes --query-embeddings and --store-embeddings, and no other does")
    vectors = [read_manifest(folder).model_dump() for folder in embeddings if folder]
    if arguments.device == "cuda" and arguments.prefilter != "none":
        raise ConfigError("--device cuda scores all records; give --prefilter none")
    store = Store(arguments.store)
    from alignment.scoring import scoring
    from alignment.search import HEADER, Search

    by = scoring(arguments.matrix, arguments.gap_open, arguments.gap_extend)
    if by.statistics is None and arguments.evalue < math.inf:
        raise ConfigError("BLAST has no E-values for this matrix with these gap penalties; give --evalue inf")
    start_s = time.perf_counter()
    with unfinished(arguments.output) as folder:
        queries = open_store([arguments.queries], arguments.ingest, folder)
        accept(folder, {**_job(arguments, by, queries, store), "embeddings": vectors})
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
        shutil.rmtree(folder)
    aligned = f"{counted(len(queries), 'protein{s}')} with {len(store):,}"
    print(f"{arguments.output}: {counted(hits, 'hit{s}')} of {aligned} ({time.perf_counter() - start_s:.1f} s)")
    return 0


def _job(arguments: Arguments, by: Scoring, queries: Store, store: Store) -> dict[str, Any]:
    """Everything that the hits depend on."""
    chosen = arguments.model_dump(mode="json", include={"hits", "evalue", "prefilter", "candidates"})
    return {
        **chosen,
        "evalue": str(arguments.evalue),
        "queries": queries.checksum,
        "store": store.checksum,
        "matrix": by.scores.tolist(),
        "gap penalties": [by.gap_open, by.gap_extend],
    }


def _align(search: Search, queries: Store, arguments: Arguments, kept: Journal) -> None:
    """Add the hits of the queries that are not done."""
    prefilter = _prefilter(arguments, search.store) if kept.done < len(queries) else None
    with record_bar("aligning") as bar:
        for number in range(kept.done, len(queries)):
            name, query = queries.id(number), queries.sequence(number).tobytes()
            records = prefilter(name, query, arguments.candidates) if prefilter else None
            hits = search.hits(query, arguments.hits, arguments.evalue, records)
            kept.add(search.row(name, query, hit) for hit in hits)
            bar(kept.done / len(queries), kept.done)


def _prefilter(arguments: Arguments, store: Store) -> EmbeddingNeighbours | SharedWords | None:
    from alignment.prefilter import EmbeddingNeighbours, SharedWords

    if arguments.query_embeddings and arguments.store_embeddings:
        return EmbeddingNeighbours(store, arguments.store_embeddings, arguments.query_embeddings)
    return SharedWords(store) if arguments.prefilter == "kmer" else None


def _on_gpu(store: Store, by: Scoring) -> Any:
    """Scores of a query with all of the store, computed on a GPU."""
    import torch

    from model.kernels.smith_waterman import SmithWaterman

    if not torch.cuda.is_available():
        raise ConfigError("--device cuda: no GPU is seen; see esmeray profile gpu")
    sequences = (by.codes[store.sequence(record)] for record in range(len(store)))
    align = SmithWaterman(sequences, by.scores, by.first, by.gap_extend, "cuda")
    return lambda query: align(by.codes[list(query)])
