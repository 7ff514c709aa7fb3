"""Find the nearest neighbours of proteins by their embeddings.

The database is an index made by 'embed index', or a folder of embeddings, which is loaded into memory (4 bytes per
value) and compared exactly. Queries are a folder of embeddings, or FASTA files, which are embedded with the model of
the database. Without queries, each protein of the database is searched among the others. Writes a TSV: query, rank,
target, and score, which is the cosine, the dot product, or the L2 distance. With --search.workers, actors of a Ray
cluster search an index, each its own parts. The hits are the same.

--search.error_rate 0.1 keeps the hits above a threshold. Above it, on average at most 10 % of a query's hits are false.
A table of labels defines false hits: their label differs from the query's (with --search.calibration_level 1, in more
than its last part). The threshold is calibrated with proteins of the database, named by --search.calibration_queries,
each searched among the others. The bound holds for similar queries, so choose proteins that the model was not trained
on. The column p_value is the probability that a query without relatives has a hit at least as good.

Examples:
  esmeray embed search proteins.index --search.queries queries.fasta --search.output hits.tsv
  esmeray embed search swissprot --search.queries proteome --search.output hits.tsv
  esmeray embed search swissprot --search.output neighbours.tsv --search.top_k 50 --search.name mean
  esmeray embed search s3://lab/proteins.index --search.queries queries --search.output hits.tsv --search.workers 8
  esmeray embed search swissprot --search.queries new.fasta --search.output hits.tsv --search.error_rate 0.1 \
--search.calibration labels.tsv --search.calibration_queries known.txt
"""

import time
from pathlib import Path
from typing import Annotated

from pydantic import Field

from esmeray.common.text import counted
from esmeray.inference.index.search import SearchSection, searching
from esmeray.inference.retrieval.conformal import ascending
from esmeray.run_folder.section import StorageSection
from esmeray.tools.grammar import ClusterSection, IngestedSection, OutputWriter, command


class SearchFileSection(SearchSection):
    """Queries, the kind of search, and the file to write."""

    output: Path
    """TSV file to write the hits to."""


@command("embed search", __doc__, made_by="search")
def main(
    database: Annotated[Path, Field(description="Index or folder of embeddings to search, or its URI.")],
    search: SearchFileSection,
    data: IngestedSection,
    storage: StorageSection,
    ray: ClusterSection,
    writer: OutputWriter,
) -> None:
    storage.apply()
    writer.refuse_file(search.output)
    start_s = time.perf_counter()
    hits = 0
    with (
        searching(database, search, data.ingest, ray.address) as opened,
        writer.file(search.output) as building,
        building.open("w", encoding="utf-8") as file,
    ):
        file.write("\t".join(opened.columns) + "\n")
        # Written row by row, so that the hits of a proteome need not fit into memory.
        for query, rank, target, score, *p_values in opened.hits():
            values = [query, str(rank), target, f"{score:.6g}", *(f"{value:.3g}" for value in p_values)]
            file.write("\t".join(values) + "\n")
            hits += 1
    index = opened.index
    if opened.calibration:
        # Scores of an L2 index are negated distances: print the distance.
        print(f"score threshold: {ascending(index.metric, opened.calibration.threshold):.6g}")
        print(opened.calibration.training)
    print(
        f"{search.output}: {counted(hits, 'hit{s}')} for {counted(opened.count, 'protein{s}')} against "
        f"{index.count:,} ({index.metric}, {index.manifest.kind}, {time.perf_counter() - start_s:.1f} s)"
    )
