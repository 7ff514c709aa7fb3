"""Relatives among SCOPe 2.08's domains below 40 % identity: a model fitted to labelled domains, align, and both.

The model is ``embed fit`` on the training part's superfamilies, without :data:`TUNING` of its domains, which choose the
weights of the blend. Queries are the validation domains, the database is all domains. Values come from
``embed evaluate``; published values (progres' searching.txt files) are of 400 other queries, the test part of the same
split.

The blend follows the hits of align: a domain scores as its own hit, or as the product of a hit and the closeness of its
vector to the hit's vector. So a domain that aligns with one member of a group finds the others. The closeness to the
query itself is additional evidence.

Shape legend: N domains, H hits of a query, C channels.
"""

import itertools
import random
from pathlib import Path

import dnaio
import numpy as np
from numpy.typing import NDArray

from benchmarks.public.benchmark import Metric, PublicBenchmark, Value, Work
from esmeray.dataset.embeddings.reader import open_vectors
from esmeray.dataset.labels.values import labels_by_id
from esmeray.dataset.targets import level_ids
from esmeray.inference.index.metric import prepared
from esmeray.inference.retrieval.metrics import query_metrics

LEVELS = ("family", "superfamily", "fold")
PUBLISHED = {
    "MMseqs2": (0.433, 0.165, 0.001),
    "ESM-2 3B, means": (0.477, 0.221, 0.014),
    "EAT (ProtT5, contrastive)": (0.843, 0.615, 0.101),
    "Foldseek (structures)": (0.850, 0.644, 0.111),
}
"""Sensitivity at each level, of the 400 test queries."""
TUNING = 300
_FOLLOWED = 30
"""Hits of align that the blend starts from."""

Weights = tuple[float, float, float, float]
"""Weight of domains close to a hit; cosines with closeness 0 and 1; weight of the cosine with the query."""


def sensitivities(work: Work) -> dict[str, Value]:
    """Return the sensitivity by method and level."""
    folder = work.folder
    write_files(work.data / "scope40", folder)
    model, output = work.weights or "FOLDER/model", "mean" if work.weights else "relatives"
    if work.weights is None:
        labelled = "--fit.input FOLDER/learnt.fasta --fit.labels FOLDER/labels.tsv --fit.level 1"
        work.run(f"embed fit {labelled} --fit.seed {work.seed} --fit.output FOLDER/model", makes="model")
    files = f"--embed.input FOLDER/all.fasta --embed.output FOLDER/vectors --embed.outputs {output}"
    work.run(f"embed run --embed.models {model} {files}", makes="vectors")
    work.run("data convert --data.source FOLDER/all.fasta --convert.store FOLDER/all.store", makes="all.store")
    files = "--align.queries FOLDER/queries.fasta --align.store FOLDER/all.store --align.output FOLDER/align.tsv"
    work.run(f"align {files} --align.hits 300 --align.evalue 10000", makes="align.tsv")
    write_blend(folder)
    values = {}
    for source in ("vectors", "align.tsv", "both.tsv"):
        queries = "--evaluate.labels FOLDER/labels.tsv --evaluate.queries FOLDER/validation.txt"
        output = f"--evaluate.output FOLDER/{source}.json --overwrite --evaluate.level_names {' '.join(LEVELS)}"
        work.run(f"embed evaluate FOLDER/{source} {queries} {output}")
        for level, metrics in work.read(f"{source}.json")["levels"].items():
            values[f"{source.removesuffix('.tsv')}, {level}"] = Value.model_validate(metrics["sensitivity"])
    return values


def write_files(data: Path, folder: Path) -> None:
    """Write the files that the commands read: sequences, labels, and lists of queries."""
    rows = [line.split("\t") for line in (data / "domains.tsv").read_text().splitlines()[1:]]
    with dnaio.open(data / "domains.fasta.gz") as records:
        sequences = {record.name: record.sequence.upper() for record in records}
    training = [name for name, _, part in rows if part == "training"]
    random.Random(0).shuffle(training)
    validation = [name for name, _, part in rows if part == "validation"]
    lists = {
        "validation": validation,
        "tuning": training[:TUNING],
        "learnt": training[TUNING:],
        "queries": validation + training[:TUNING],
        "all": [name for name, _, _ in rows],
    }
    for name, ids in lists.items():
        (folder / f"{name}.txt").write_text("\n".join(ids))
        (folder / f"{name}.fasta").write_text("".join(f">{domain}\n{sequences[domain]}\n" for domain in ids))
    (folder / "labels.tsv").write_text("\n".join(["id\tlabel", *(f"{name}\t{label}" for name, label, _ in rows)]))


def write_blend(folder: Path) -> None:
    """Write ``both.tsv``: the validation queries' hits by the blend, with weights from the tuning queries."""
    embeddings = open_vectors(folder / "vectors")
    vectors_NC = prepared("cosine", embeddings[:])
    labels = labels_by_id(folder / "labels.tsv", "label", "")
    groups_NL = level_ids([labels[name] for name in embeddings.ids], len(LEVELS))
    queries, targets, evalues = np.loadtxt(folder / "align.tsv", dtype=str, usecols=(0, 1, 10), unpack=True)
    domains = np.array([embeddings.numbers[name] for name in targets])

    def ranked(name: str, weights: Weights) -> tuple[int, NDArray[np.int64]]:
        own = queries == name
        query = embeddings.numbers[name]
        scores_N = blended(vectors_NC, query, domains[own], evalues[own].astype(float), weights)
        return query, np.argsort(-scores_N, kind="stable")

    def quality(weights: Weights) -> float:
        """Return the sensitivity of families plus the sensitivity of superfamilies."""
        names = (folder / "tuning.txt").read_text().split()
        values_QLM = np.array([query_metrics(groups_NL, *ranked(name, weights)) for name in names])
        return float(np.nanmean(values_QLM[:, :2, 0], axis=0).sum())

    grid = itertools.product((0.9,), (0.0, 0.2), (0.3, 0.4, 0.6), (0.0, 1.0, 2.0, 3.0, 4.0))
    weights = max([(0.0, 0.0, 1.0, 0.0), *grid], key=quality)
    with (folder / "both.tsv").open("w") as file:
        for name in (folder / "validation.txt").read_text().split():
            hits_N = ranked(name, weights)[1]
            file.writelines(f"{name}\t{embeddings.ids[hit]}\n" for hit in hits_N[:2000])


def blended(
    vectors_NC: NDArray, query: int, domains_H: NDArray[np.int64], evalues_H: NDArray[np.float64], weights: Weights
) -> NDArray[np.float64]:
    """Return (N,) scores of all domains from hits in the order of align."""
    hits_weight, none, full, own_weight = weights
    # Among the expected number of chance hits and itself, a hit is the true one with this probability. The second term
    # keeps the order of align among equal ones.
    sure_H = 1 / (1 + evalues_H) - 1e-9 * np.arange(len(evalues_H))
    followed = np.flatnonzero(domains_H != query)[:_FOLLOWED]
    near_HN = np.clip((vectors_NC[domains_H[followed]] @ vectors_NC.T - none) / (full - none), 0, 1)
    scores_N = (hits_weight * sure_H[followed, None] * near_HN).max(0, initial=0)
    scores_N[domains_H] = np.maximum(scores_N[domains_H], sure_H)
    # Combined as independent evidence; the query's cosine alone is never certain.
    own_N = np.clip(own_weight * (vectors_NC @ vectors_NC[query]), 0, 0.95)
    return 1 - (1 - scores_N) * (1 - own_N)


BENCHMARKS = (
    PublicBenchmark(
        name="scope40",
        title="Relatives: SCOPe40",
        about={
            "data": "SCOPe 2.08 domains below 40 % identity, by greener-group/progres (MIT)",
            "split": "training 13,318 domains, 300 of them weight the blend; queries: 200 validation domains, "
            "database: all 14,727",
            "plain baseline": "align, Smith-Waterman with BLOSUM62",
            "published values": "progres' searching.txt files, the 400 test queries",
            "not comparable": "published values are of the test queries; ESM-2 and ProtT5 start from trained weights. "
            "Ours are fitted to the training domains' superfamilies, from counts of k-mers alone",
        },
        metrics=tuple(
            Metric(
                f"{method}, {level}",
                f"sensitivity, {level}, {title}",
                f"align, {level}",
                {name: values[index] for name, values in PUBLISHED.items()},
            )
            for method, title in (("vectors", "vectors"), ("both", "vectors and align"))
            for index, level in enumerate(LEVELS)
        ),
        measure=sensitivities,
    ),
)
