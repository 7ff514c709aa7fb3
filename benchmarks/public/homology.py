"""Relatives among SCOPe 2.08's domains below 40 % identity: a contrastive encoder from random weights, align, and both.

The encoder learns from the training part, less :data:`TUNING` of its domains, which choose the weights of the blend.
Queries are the validation domains, the database all domains. Values are those of ``embed evaluate``; published ones
(progres' searching.txt files) are of 400 other queries, the test part of the same split.

The blend follows the hits of align: a domain scores as high as its own hit, or as the product of a hit and the cosine
of its vector with the hit's, or as its cosine with the query. So what aligns with one member of a group finds the
others, whose vectors lie close to it.

Shape legend: N domains, H hits of a query, C channels.
"""

import gzip
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esmeray.benchmarks.harness.stage import REPOSITORY
from esmeray.dataset.embeddings.reader import open_vectors
from esmeray.dataset.labels.levels import level_ids
from esmeray.dataset.labels.values import labels_by_id
from esmeray.dataset.table import Table
from esmeray.inference.index.metric import prepared
from esmeray.inference.retrieval.conformal import chosen
from esmeray.inference.retrieval.metrics import query_metrics

LEVELS = ("family", "superfamily", "fold")
PUBLISHED = {
    "MMseqs2": (0.433, 0.165, 0.001),
    "ESM-2 3B, means": (0.477, 0.221, 0.014),
    "EAT (ProtT5, contrastive)": (0.843, 0.615, 0.101),
    "Foldseek (structures)": (0.850, 0.644, 0.111),
}
"""Sensitivity of the levels, of the 400 test queries."""
TUNING = 300
RECIPE = (
    "--model.contrastive.level_weights 1 1 0.2 --model.contrastive.group_level 1 --batch.tokens 16384 "
    "--batch.global_tokens 16384 --training.epochs 30 --ray.num_workers 1"
)
INGREDIENTS = {
    "mutations": "--model.contrastive.mutation_share 0",
    "superfamilies and folds": "--model.contrastive.level_weights 1 --model.contrastive.group_level 0",
}
"""Options that leave one out."""
_FOLLOWED = 30
"""Hits of align that the blend goes on from."""

Values = dict[str, tuple[float, tuple[float, float] | None]]
"""By name, with the interval where there is one."""


def measure(folder: Path, seeds: Sequence[int], data: Path, options: str = "") -> list[dict[str, Any]]:
    """A row for each seed and value; ``data`` has scope40's files, what is made stays in ``folder``."""
    rows = []
    for seed in seeds:
        for name, (value, interval) in measured(_run, data, folder / str(seed), seed, options).items():
            rows.append({"benchmark": "scope40", "name": name, "seed": seed, "value": value, "interval": interval})
    return rows


def measured(run: Callable[..., Any], data: Path, folder: Path, seed: int, options: str = "") -> Values:
    """Sensitivity by method and level. ``run``: ``esmeray WORDS``. ``options``: of the training, after the recipe's."""
    folder.mkdir(parents=True, exist_ok=True)
    write_files(data, folder)
    table = f"--data.source {folder}/domains.tsv --data.labels.id_column id --data.labels.split column"
    named = f"--data.labels.split_column split --run.name encoder --run.storage_path {folder} --run.seed {seed}"
    run(*f"train --config train_config/contrastive.yaml {table} {named} {RECIPE} {options}".split())
    vectors = f"--embed.input {folder}/all.fasta --embed.output {folder}/vectors"
    run(*f"embed run --embed.models {folder}/encoder {vectors}".split())
    if not (folder / "align.tsv").exists():  # of a seed that was stopped
        run(*f"data convert --data.source {folder}/all.fasta --convert.store {folder}/all.store --overwrite".split())
        search = f"align --align.queries {folder}/queries.fasta --align.store {folder}/all.store"
        run(*f"{search} --align.output {folder}/align.tsv --align.hits 300 --align.evalue 10000".split())
    write_blend(folder)
    values: Values = {}
    for source in ("vectors", "align.tsv", "both.tsv"):
        asked = f"--evaluate.labels {folder}/labels.tsv --evaluate.queries {folder}/validation.txt"
        written = f"--evaluate.output {folder}/{source}.json --overwrite --evaluate.level_names {' '.join(LEVELS)}"
        run(*f"embed evaluate {folder}/{source} {asked} {written}".split())
        levels = json.loads((folder / f"{source}.json").read_text(encoding="utf-8"))["levels"]
        for level in LEVELS:
            sensitivity = levels[level]["sensitivity"]
            values[f"{source.removesuffix('.tsv')}, {level}"] = (sensitivity["value"], sensitivity["interval"])
    return values


def _run(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "esmeray.tools", *words], cwd=REPOSITORY, check=True)


def write_files(data: Path, folder: Path) -> None:
    """What the commands read: the table to train on, sequences, labels, and lists of queries."""
    domains = Table(data / "domains.tsv", {"id": "", "classification": "", "part": ""}).columns()
    ids, labels, parts = domains["id"], domains["classification"], domains["part"]
    with gzip.open(data / "domains.fasta.gz", "rt") as file:
        records = (record.split("\n", 1) for record in file.read().split(">")[1:])
        sequences = {name.strip(): text.replace("\n", "").upper() for name, text in records}
    of_part = {part: [name for name, own in zip(ids, parts, strict=True) if own == part] for part in set(parts)}
    random.Random(0).shuffle(of_part["training"])
    validation, tuning = of_part["validation"], of_part["training"][:TUNING]
    splits = {"training": "train"} | dict.fromkeys(tuning, "valid")
    rows = [
        f"{name}\t{sequences[name]}\t{label}\t{splits.get(name, splits[part])}\n"
        for name, label, part in zip(ids, labels, parts, strict=True)
        if part in splits
    ]
    fasta = {"all": ids, "queries": [*validation, *tuning]}
    texts = {
        f"{file}.fasta": "".join(f">{name}\n{sequences[name]}\n" for name in names) for file, names in fasta.items()
    }
    texts |= {"validation.txt": "\n".join(validation), "tuning.txt": "\n".join(tuning)}
    texts["labels.tsv"] = "id\tlabel\n" + "".join(f"{name}\t{label}\n" for name, label in zip(ids, labels, strict=True))
    texts["domains.tsv"] = "id\tsequence\tlabel\tsplit\n" + "".join(rows)
    for name, text in texts.items():
        (folder / name).write_text(text)


def write_blend(folder: Path) -> None:
    """``both.tsv``: the validation queries' hits by the blend of align and vectors, as the tuning queries weight it."""
    embeddings = open_vectors(folder / "vectors")
    numbers = embeddings.numbers
    vectors_NC = prepared("cosine", embeddings[:])
    labels = labels_by_id(folder / "labels.tsv", "id", "label", "")
    groups_NL = level_ids([labels[name] for name in embeddings.ids], len(LEVELS))
    hits: dict[int, tuple[list[int], list[float]]] = {}
    for line in (folder / "align.tsv").read_text().splitlines():
        row = line.split("\t")
        domains, evalues = hits.setdefault(numbers[row[0]], ([], []))
        domains.append(numbers[row[1]])
        evalues.append(float(row[10]))

    def ranked(query: int, weights: tuple[float, float, int]) -> NDArray[np.int64]:
        return np.argsort(-blended(vectors_NC, query, *map(np.array, hits[query]), *weights), kind="stable")

    def quality(weights: tuple[float, float, int]) -> float:
        """Sensitivity of families and superfamilies together."""
        queries = chosen(folder / "tuning.txt", numbers)
        rows = [query_metrics(groups_NL, query, ranked(query, weights)) for query in queries]
        return float(np.nanmean(np.array(rows)[:, :2, 0], axis=0).sum())

    best = max(itertools.product((0, 0.5, 0.9, 0.99), (0, 0.1, 0.3, 0.6), (1, 4, 16)), key=quality)
    with (folder / "both.tsv").open("w") as file:
        for query in chosen(folder / "validation.txt", numbers):
            for domain in ranked(query, best)[:2000]:
                file.write(f"{embeddings.ids[query]}\t{embeddings.ids[domain]}\n")
    (folder / "weights.json").write_text(json.dumps(best))


def blended(
    vectors_NC: NDArray,
    query: int,
    domains_H: NDArray[np.int64],
    evalues_H: NDArray[np.float64],
    hits_weight: float,
    query_weight: float,
    power: int,
) -> NDArray[np.float64]:
    """(N,) scores of all domains, by hits in the order of align; ``power`` of cosines makes near ones stand out."""
    # With so many chance hits expected, a hit is the true one of them and itself with this probability. Of equal ones,
    # which end at 1, the order of align counts.
    sure_H = 1 / (1 + evalues_H) - 1e-9 * np.arange(len(evalues_H))
    is_other_H = domains_H != query
    near_HN = np.maximum(vectors_NC[domains_H[is_other_H][:_FOLLOWED]] @ vectors_NC.T, 0) ** power
    scores_N = hits_weight * (sure_H[is_other_H][:_FOLLOWED, None] * near_HN).max(0, initial=0)
    scores_N = np.maximum(scores_N, query_weight * np.maximum(vectors_NC @ vectors_NC[query], 0) ** power)
    scores_N[domains_H] = np.maximum(scores_N[domains_H], sure_H)
    return scores_N
