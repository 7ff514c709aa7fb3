"""Align proteins with all of a store: the work of ``esmeray align``, also as a function of Python.

The journal of the unfinished output has the hits of each query that is done; the same command resumes there. Mistakes
are reported before parasail and torch are loaded.
"""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

from pydantic import Field

from esmeray.common.errors import ConfigError
from esmeray.common.progress import record_bar
from esmeray.common.publishing import NOTES, made_file, output_or_scratch, refuse_file
from esmeray.dataset.embeddings.manifest import Index
from esmeray.dataset.fasta.counts import count_lines
from esmeray.dataset.section import IngestSection
from esmeray.dataset.store.conversion import job_store
from esmeray.dataset.store.reader import Store
from esmeray.run_folder.job import Journal, accept, journal, unfinished
from esmeray.train_config.section import PositiveFloat, PositiveInt, Section

if TYPE_CHECKING:
    import pandas as pd

    from esmeray.alignment.scoring import Scoring
    from esmeray.alignment.search import EmbeddingNeighbours, Search, SharedWords
    from esmeray.inference.settings import AlignSettings

MADE_BY = "align"
COLUMNS = {
    "qseqid": str,
    "sseqid": str,
    "pident": float,
    "length": int,
    "mismatch": int,
    "gapopen": int,
    "qstart": int,
    "qend": int,
    "sstart": int,
    "send": int,
    "evalue": float,
    "bitscore": float,
}
"""Columns of BLAST's output format 6, and their types."""


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
    embeddings: list[Path] = Field(default=[], max_length=2)
    """Folders of embeddings, one vector per protein, for the prefilter embedding: the queries' and the store's, or one
    that has both."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device that computes the scores; cuda scores all records, without a prefilter."""


def align(
    queries: str | Path,
    store: str | Path,
    *,
    output: str | Path | None = None,
    overwrite: bool = False,
    **settings: "Unpack[AlignSettings]",
) -> "pd.DataFrame":
    """Align proteins with all of a store, as ``esmeray align``.

    Args:
        queries: FASTA file, folder or glob, or a store.
        store: store of proteins to search in; ``esmeray data convert`` makes one.
        output: TSV file to write; by default nothing is written.
        overwrite: replace an output that an alignment made.
        settings: others of the command, such as ``hits``, ``evalue``, ``matrix``, ``prefilter`` and ``device``.

    Returns a row for each hit, the best of a query first, with the columns of BLAST's output format 6. All hits are in
    memory. ``attrs["notes"]`` counts the queries that were changed or left out. Raises EsmerayError for what the
    command refuses.

    >>> hits = esmeray.align("proteins.fasta", "proteins.store", evalue=float("inf"), hits=1)
    >>> hits[["qseqid", "sseqid", "pident"]]
       qseqid  sseqid  pident
    0   first   first   100.0
    1  second  second   100.0
    2   third   third   100.0
    """
    import pandas as pd

    with output_or_scratch(output) as target:
        section = AlignSection.of(queries=str(queries), store=store, output=target, **settings)
        aligned, _, _ = align_to_file(section, IngestSection(), overwrite)
        # Ids are text, whatever they look like: "NA", "1e5" and "5'" are proteins' names. 3 is csv.QUOTE_NONE.
        hits = pd.read_csv(
            section.output,
            sep="\t",
            names=[*COLUMNS],
            dtype=COLUMNS,
            keep_default_na=False,
            na_values={"evalue": ["nan"], "bitscore": ["nan"]},
            quoting=3,
        )
    hits.attrs[NOTES] = count_lines(aligned.manifest.counts)
    return hits


def align_to_file(section: AlignSection, ingest: IngestSection, overwrite: bool) -> tuple[Store, int, int]:
    """Write the hits of all queries, or resume. Return queries, number of records searched, and number of hits.

    Raises as :func:`align`, before anything is computed if possible.
    """
    refuse_file(section.output, MADE_BY, overwrite)
    if (section.prefilter == "embedding") != bool(section.embeddings):
        raise ConfigError("align.prefilter: embedding needs align.embeddings; the other prefilters don't")
    # The job records the manifest of every part: an added part changes the candidates.
    vectors = [part.manifest.model_dump() for folder in section.embeddings for part in Index(folder).parts]
    if section.device == "cuda" and section.prefilter != "none":
        raise ConfigError("--align.device cuda scores all records; give --align.prefilter none")
    store = Store(section.store)
    from esmeray.alignment.scoring import scoring
    from esmeray.alignment.search import Search

    by = scoring(section.matrix, section.gap_open, section.gap_extend)
    # Karlin-Altschul parameters come from tables, which BLAST has only for its own combinations of matrix and gaps.
    if by.statistics is None and section.evalue < math.inf:
        raise ConfigError("no E-value statistics for this matrix and these gap penalties; give --align.evalue inf")
    with unfinished(section.output, MADE_BY) as folder:
        queries = job_store([section.queries], ingest, folder)
        job = {
            **section.model_dump(include={"hits", "prefilter", "candidates"}),
            "evalue": str(section.evalue),  # JSON has no infinity
            "queries": queries.checksum,
            "store": store.checksum,
            "matrix": by.scores.tolist(),  # scores instead of the name: the content of a file may change
            "gap penalties": [by.gap_open, by.gap_extend],
            "embeddings": vectors,
        }
        accept(folder, job)
        with journal(folder) as done:
            scores = _on_gpu(store, by) if section.device == "cuda" else None
            _align(Search(store, by, scores=scores), queries, section, done)
        hits = 0
        # The journal has every hit. The file is written in one go, so that it is either complete or absent.
        with (
            made_file(section.output, MADE_BY, overwrite) as building,
            building.open("w", encoding="utf-8") as file,
        ):
            for line in done.lines():
                file.write(line)
                hits += 1
    return queries, len(store), hits


def _align(search: "Search", queries: Store, section: AlignSection, done: Journal) -> None:
    # The prefilter reads the whole store. A search whose hits are all in the journal does not need it.
    prefilter = _prefilter(section, search.store) if done.done < len(queries) else None
    with record_bar("aligning") as bar:
        for number in range(done.done, len(queries)):
            name, query = queries.id(number), queries.sequence(number).tobytes()
            records = prefilter(name, query, section.candidates) if prefilter else None
            done.add(search.row(name, query, hit) for hit in search.hits(query, section.hits, section.evalue, records))
            bar(done.done / len(queries), done.done)


def _prefilter(section: AlignSection, store: Store) -> "EmbeddingNeighbours | SharedWords | None":
    from esmeray.alignment.search import EmbeddingNeighbours, SharedWords

    if section.embeddings:
        return EmbeddingNeighbours(store, section.embeddings[-1], section.embeddings[0])
    return SharedWords(store) if section.prefilter == "kmer" else None


def _on_gpu(store: Store, by: "Scoring") -> Any:
    """Return a function that scores a query against the whole store on a GPU."""
    import torch

    from esmeray.model.kernels.smith_waterman import SmithWaterman

    if not torch.cuda.is_available():
        raise ConfigError("--align.device cuda: no GPU found; see esmeray profile gpu")
    sequences = (by.codes[store.sequence(record)] for record in range(len(store)))
    scores_of = SmithWaterman(sequences, by.scores, by.first, by.gap_extend, "cuda")
    return lambda query: scores_of(by.codes[list(query)])  # residue letters to rows of the matrix
