"""Exact alignment of proteins with a store, beside parasail called pair by pair; what a prefilter loses.

All contenders compute Smith-Waterman scores by BLOSUM62 with BLAST's penalties, of the same queries, spread over the
lengths. ``Search`` is given every core, parasail one as a loop in Python has it, with a profile for each query as its
documentation advises. The unit is 10^9 cells of the matrix a second (GCUPS). The last cases measure the prefilter by
words: queries a second at ten hits, traced and written as rows, and the share of the hits with E-values up to 0.001,
without the query itself, that it keeps.
"""

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.harness.proteins import read_proteins, spread_by_length, write_store
from benchmarks.harness.stage import (
    Case,
    Comparison,
    Contender,
    Facts,
    Reference,
    Setting,
    Stage,
    WrongWorkError,
)
from esmeray.alignment.scoring import scoring
from esmeray.alignment.search import Search, SharedWords
from esmeray.dataset.store.reader import Store

SCORES, QUERIES, RECALL = "scores of a query with a store", "ten hits of a query", "hits that a prefilter keeps"
OURS, LOOP, WORDS, ALL = "Search", "parasail in a loop", "prefilter kmer", "no prefilter"
NUMBER, EVALUE, CANDIDATES = 30, 1e-3, 1000


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    chosen = proteins.sequences[: 200 if setting.quick else None]
    # BLOSUM62 has neither selenocysteine nor pyrrolysine: so written, both sides score the same letters.
    texts = [text.replace("U", "C").replace("O", "X") for text in chosen]
    search = Search(Store(write_store(setting.folder, texts)), scoring())
    queries = spread_by_length(texts, 3 if setting.quick else NUMBER)
    facts: Facts = {**proteins.facts, "queries": len(queries), "threads": search.threads}
    yield _scores(search, texts, queries, facts)
    yield from _prefiltered(search, queries, spread_by_length(texts, 10 if setting.quick else 300), facts)


def _scores(search: Search, texts: list[str], queries: list[str], facts: Facts) -> Case:
    """Scores of queries with all texts."""
    import parasail

    gcells = 1e-9 * sum(map(len, queries)) * sum(map(len, texts))

    def ours() -> float:
        for query in queries:
            search.scores(query.encode())
        return gcells

    def loop(queries: list[str]) -> list[list[int]]:
        scores = []
        for query in queries:
            # Once a query, as its documentation advises; "sat" takes 8 bits where they hold the score, else 16.
            profile = parasail.profile_create_sat(query, parasail.blosum62)
            scores.append([parasail.sw_striped_profile_sat(profile, text, 12, 1).score for text in texts])
        return scores

    def one_by_one() -> float:
        loop(queries)
        return gcells

    def check() -> Facts:
        # Two queries: the loop takes its seconds for each.
        for query, expected in zip(queries[:2], loop(queries[:2]), strict=True):
            if search.scores(query.encode()).tolist() != expected:
                raise WrongWorkError("scores differ from parasail's")
        return {"largest difference of a score": 0}

    ways = (Contender(OURS, ours), Contender(LOOP, one_by_one))
    return Case(SCORES, "GCUPS", ways, rounds=3, check=check, facts=facts)


def _prefiltered(search: Search, queries: list[str], judged: list[str], facts: Facts) -> Iterator[Case]:
    """Hits of queries among the candidates of a prefilter, and what it loses of those of the judged."""
    words = SharedWords(search.store)
    candidates: dict[str, Callable[[bytes], object]] = {
        WORDS: lambda query: words("", query, CANDIDATES),
        ALL: lambda query: None,
    }

    def hits(query: bytes, name: str, evalue: float = 10.0, count: int = 10) -> list:
        return search.hits(query, count, evalue, candidates[name](query))  # type: ignore[arg-type]

    def rows(name: str) -> float:
        for query in map(str.encode, queries):
            for hit in hits(query, name):
                search.row("query", query, hit)
        return len(queries)

    contenders = tuple(Contender(name, partial(rows, name)) for name in (WORDS, ALL))
    yield Case(QUERIES, "queries/s", contenders, rounds=3, facts={"candidates": CANDIDATES, **facts})

    def recall() -> float:
        judged_hits = kept = 0
        for query in map(str.encode, judged):
            # One hit more than is kept, since the first is the query itself.
            related = {hit.record for hit in hits(query, ALL, EVALUE, 11)[1:]}
            kept += len(related & {hit.record for hit in hits(query, WORDS, EVALUE, 11)})
            judged_hits += len(related)
        return kept / max(1, judged_hits)

    recalled = {"candidates": CANDIDATES, "largest E-value": EVALUE, **facts}
    yield Case(RECALL, "share", (Contender(WORDS, recall, "value"),), rounds=1, facts=recalled)


STAGE = Stage(
    name="alignment",
    summary="exact Smith-Waterman of queries with a store, beside parasail; what a prefilter loses",
    cases=_cases,
    comparisons=(
        Comparison(SCORES, OURS, LOOP, {"cpu": 1.2}),
        Comparison(QUERIES, WORDS, ALL, {"cpu": 2.0}),
        Comparison(RECALL, WORDS, Reference("all hits", 1.0), {"cpu": 0.9}),
    ),
    packages=("parasail",),
    distributions=("parasail",),
)
