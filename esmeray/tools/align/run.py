"""Align proteins with a store, and write the best hits of each protein in BLAST's tabular format.

Scores are exact: Smith-Waterman with affine gaps on all cores, or on a GPU. A gap of n residues costs gap_open plus n
times gap_extend, as in BLAST. The output has the columns of BLAST's output format 6. E-values and bit scores agree with
blastp without composition-based statistics. A prefilter aligns fewer records, and misses some hits. The same command
resumes an interrupted search.

Examples:
  esmeray align --align.queries proteins.fasta --align.store proteins.store --align.output hits.tsv
  esmeray align --align.queries proteins.fasta --align.store proteins.store --align.output close.tsv --align.hits 50 \
--align.evalue 1e-3 --align.matrix BLOSUM80
  esmeray align --align.queries proteins.fasta --align.store proteins.store --align.output fast.tsv \
--align.prefilter kmer --align.candidates 500 --align.header true
  esmeray align --align.queries proteins.fasta --align.store proteins.store --align.output near.tsv \
--align.prefilter embedding --align.query_embeddings embeddings --align.store_embeddings embeddings
"""

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from esmeray.common.errors import ConfigError
from esmeray.common.progress import record_bar
from esmeray.common.text import counted
from esmeray.dataset.embeddings.manifest import Index
from esmeray.dataset.fasta.counts import count_lines
from esmeray.dataset.store.conversion import job_store
from esmeray.dataset.store.reader import Store
from esmeray.run_folder.job import Journal, accept, journal, unfinished
from esmeray.tools.grammar import IngestedSection, Made, command
from esmeray.train_config.section import PositiveFloat, PositiveInt, Section

if TYPE_CHECKING:
    from esmeray.alignment.scoring import Scoring
    from esmeray.alignment.search import EmbeddingNeighbours, Search, SharedWords


class AlignSection(Section):
    """Queries, store, scoring, and hits to keep."""

    queries: str
    """FASTA file, folder or quoted glob, or a store."""
    store: Path
    """Store of proteins to search."""
    output: Path
    """TSV file to write the hits to."""
    hits: PositiveInt = 10
    """Maximum number of hits per query."""
    evalue: PositiveFloat = 10.0
    """Maximum E-value of a hit; inf keeps all hits."""
    matrix: str = "BLOSUM62"
    """Substitution matrix: BLOSUM45, 50, 62 or 80, PAM250, or a file in NCBI's format."""
    gap_open: Annotated[int, Field(ge=0, le=1000)] | None = None
    """Penalty for opening a gap. Default: BLAST's for the matrix."""
    gap_extend: Annotated[int, Field(gt=0, le=1000)] | None = None
    """Penalty per residue of a gap. Default: BLAST's for the matrix."""
    prefilter: Literal["none", "kmer", "embedding"] = "none"
    """Records to align with a query. none: all records; kmer: records that share words of four residues with it;
    embedding: records with the most similar embeddings."""
    candidates: PositiveInt = 1000
    """Number of records per query that a prefilter keeps."""
    query_embeddings: Path | None = None
    """Folder of embeddings of the queries, one vector per protein."""
    store_embeddings: Path | None = None
    """Folder of embeddings of the store, one vector per protein."""
    header: bool = False
    """Write the names of the columns as the first line."""
    threads: PositiveInt | None = None
    """Number of CPU threads. Default: the cores that this process may use."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device that computes the scores; cuda scores all records, without a prefilter."""


@command("align", __doc__, made_by="align")
def main(align: AlignSection, data: IngestedSection, made: Made) -> None:
    # Check everything before computing anything.
    made.refuse_file(align.output)
    embeddings = [align.query_embeddings, align.store_embeddings]
    if {align.prefilter == "embedding"} != {folder is not None for folder in embeddings}:
        raise ConfigError("align.prefilter: embedding takes query_embeddings and store_embeddings, and no other does")
    # The job records the manifest of every part: an added part changes the candidates.
    vectors = [part.manifest.model_dump() for folder in embeddings if folder for part in Index(folder).parts]
    if align.device == "cuda" and align.prefilter != "none":
        raise ConfigError("--align.device cuda scores all records; give --align.prefilter none")
    store = Store(align.store)
    from esmeray.alignment.scoring import scoring
    from esmeray.alignment.search import HEADER, Search

    by = scoring(align.matrix, align.gap_open, align.gap_extend)
    # Karlin-Altschul parameters come from tables, which BLAST has only for its own combinations of matrix and gaps.
    if by.statistics is None and align.evalue < math.inf:
        raise ConfigError("BLAST has no E-values for this matrix with these gap penalties; give --align.evalue inf")
    start_s = time.perf_counter()
    hits = 0
    with unfinished(align.output, made.made_by) as folder:
        queries = job_store([align.queries], data.ingest, folder)
        job = {
            **align.model_dump(include={"hits", "prefilter", "candidates"}),
            "evalue": str(align.evalue),  # JSON has no infinity
            "queries": queries.checksum,
            "store": store.checksum,
            "matrix": by.scores.tolist(),  # scores instead of the name: the content of a file may change
            "gap penalties": [by.gap_open, by.gap_extend],
            "embeddings": vectors,
        }
        accept(folder, job)
        with journal(folder) as kept:
            scores = _on_gpu(store, by) if align.device == "cuda" else None
            _align(Search(store, by, threads=align.threads, scores=scores), queries, align, kept)
        # The journal has every hit. The file is written in one go, so that it is either complete or absent.
        with (
            made.file(align.output) as building,
            building.open("w", encoding="utf-8") as file,
        ):
            if align.header:
                file.write(f"{HEADER}\n")
            for line in kept.lines():
                file.write(line)
                hits += 1
    aligned = f"{counted(len(queries), 'protein{s}')} with {len(store):,}"
    print(f"{align.output}: {counted(hits, 'hit{s}')} of {aligned} ({time.perf_counter() - start_s:.1f} s)")
    print("\n".join(f"  {line}" for line in count_lines(queries.manifest.counts)))


def _align(search: "Search", queries: Store, section: AlignSection, kept: Journal) -> None:
    # The prefilter reads the whole store. A search whose hits are all in the journal does not need it.
    prefilter = _prefilter(section, search.store) if kept.done < len(queries) else None
    with record_bar("aligning") as bar:
        for number in range(kept.done, len(queries)):
            name, query = queries.id(number), queries.sequence(number).tobytes()
            records = prefilter(name, query, section.candidates) if prefilter else None
            kept.add(search.row(name, query, hit) for hit in search.hits(query, section.hits, section.evalue, records))
            bar(kept.done / len(queries), kept.done)


def _prefilter(section: AlignSection, store: Store) -> "EmbeddingNeighbours | SharedWords | None":
    from esmeray.alignment.search import EmbeddingNeighbours, SharedWords

    if section.query_embeddings and section.store_embeddings:
        return EmbeddingNeighbours(store, section.store_embeddings, section.query_embeddings)
    return SharedWords(store) if section.prefilter == "kmer" else None


def _on_gpu(store: Store, by: "Scoring") -> Any:
    """Return a function that scores a query against the whole store on a GPU."""
    import torch

    from esmeray.model.kernels.smith_waterman import SmithWaterman

    if not torch.cuda.is_available():
        raise ConfigError("--align.device cuda: no GPU is seen; see esmeray profile gpu")
    sequences = (by.codes[store.sequence(record)] for record in range(len(store)))
    align = SmithWaterman(sequences, by.scores, by.first, by.gap_extend, "cuda")
    return lambda query: align(by.codes[list(query)])  # residue letters to rows of the matrix
