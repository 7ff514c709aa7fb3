"""Find the nearest neighbours of proteins by their embeddings.

The database is an index that 'embed index' made, or a folder of embeddings, which is compared exactly, in memory: 4
bytes a value. Queries are a folder of embeddings or FASTA files, which are embedded by the model of the database.
Writes a TSV: query, rank, target, and score: the cosine, the dot product, or the L2 distance. Without queries each
protein of the database is searched in the rest of it. By --search.workers actors of a Ray cluster search an index, each
its own parts of it, with the same hits.

--search.error_rate 0.1 keeps the hits above a threshold at which a query has on average at most 10 % false ones. A
table of labels says what is false: a hit of another label (--search.calibration_level 1: whose label differs before its
last part). Proteins of the database calibrate, those of --search.calibration_queries, each searched in the rest; the
bound holds for queries like them, so take none that a model was trained on. A column p_value has the chance that a
query without relatives has so good a hit.

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
from esmeray.tools.grammar import ClusterSection, IngestedSection, Made, command


class SearchFileSection(SearchSection):
    """Queries, the kind of search, and the file to write."""

    output: Path
    """TSV file of the results to write."""


@command("embed search", __doc__, made_by="search")
def main(
    database: Annotated[Path, Field(description="Index, or folder of embeddings, to search in; or the URI of one.")],
    search: SearchFileSection,
    data: IngestedSection,
    storage: StorageSection,
    ray: ClusterSection,
    made: Made,
) -> None:
    storage.apply()
    made.refuse_file(search.output)
    start_s = time.perf_counter()
    hits = 0
    with (
        searching(database, search, data.ingest, ray.address) as begun,
        made.file(search.output) as building,
        building.open("w", encoding="utf-8") as file,
    ):
        file.write("\t".join(begun.columns) + "\n")
        # Row by row: the hits of a whole proteome need not be in memory.
        for query, rank, target, score, *p_values in begun.hits():
            values = [query, str(rank), target, f"{score:.6g}", *(f"{value:.3g}" for value in p_values)]
            file.write("\t".join(values) + "\n")
            hits += 1
    index = begun.index
    if begun.calibration:
        # A distance where the measure is one.
        print(f"threshold of the score: {ascending(index.metric, begun.calibration.threshold):.6g}")
        print(begun.calibration.training)
    print(
        f"{search.output}: {counted(hits, 'hit{s}')} of {counted(begun.count, 'protein{s}')} searched in "
        f"{index.count:,} ({index.metric}, {index.manifest.kind}, {time.perf_counter() - start_s:.1f} s)"
    )
