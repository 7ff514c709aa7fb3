"""Measured mutants: six deep mutational scans of METL, with EVE's score as the prior, and beta-lactamase, with
DeepSequence's.

Spearman's coefficient of the mutants that are left once some at random are measured, and campaigns of five plates.
Features are one_hot: no weights have a part.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import mean

import pandas as pd

from benchmarks.public.benchmark import Metric, PublicBenchmark, Value, Work

SIZES = (64, 256, 1024)
RIDGE: dict[str, dict[str, float]] = {
    "dlg4-2022-abundance": {"ridge on one-hot": 0.561},
    "dlg4-2022-binding": {"ridge on one-hot": 0.530},
    "grb2-abundance": {"ridge on one-hot": 0.495},
    "pab1": {"ridge on one-hot": 0.526},
    "pten-abundance": {},
    "pten-activity": {},
}
"""References computed on each assay with 256 mutants; ridge predicts nothing of PTEN's single mutants."""
_CAMPAIGN = {"proposals": "found", "greedy by the zero-shot score": "found: zero-shot", "random": "found: random"}
_BETA_LACTAMASE_SIZES = (48, 96, 240)


def _run(work: Work, command: str, settings: Mapping[str, object], *lists: object) -> None:
    """A command on measured mutants, whose output is the folder of its name."""
    output = work.folder / command
    if not output.exists():  # of a seed that was stopped
        own = {"features": "one_hot", "output": output, "seed": work.seed, **settings}
        words = [word for key, value in own.items() for word in (f"--{command}.{key}", value)]
        work.run("mutations", command, *words, *lists)


def _assays(work: Work) -> dict[str, Value]:
    data = work.data / "mutations" / "metl"
    settings = {
        "sequence": data / "wild_types.fasta",
        "table": data,
        "measured_column": "measured",
        "zero_shot_column": "eve",
    }
    _run(work, "fit", settings, "--fit.folds", "rest", "--fit.sizes", *SIZES)
    evaluation = work.read("fit/evaluation.json")
    values: dict[str, Value] = {}
    for size in SIZES:
        by_assay = evaluation[f"Folds rest, {size} training mutants"]
        ours = {assay: by_assay[assay]["metrics"]["spearman"] for assay in RIDGE}
        eve = {assay: by_assay[assay]["baselines"]["zero-shot score"]["metrics"]["spearman"] for assay in RIDGE}
        for ending, spearman in (("", ours), (": EVE", eve)):
            values |= {f"{assay} {size}{ending}": Value(value=value) for assay, value in spearman.items()}
            values[f"mean {size}{ending}"] = Value(value=mean(spearman.values()))
    _run(work, "campaign", settings)
    table = pd.read_csv(work.folder / "campaign" / "campaign.csv")
    found = table[(table["round"] == table["round"].max()) & (table["repeat"] == 0)].groupby("way")["found"].mean()
    return values | {name: Value(value=found[way]) for way, name in _CAMPAIGN.items()}


def _beta_lactamase(work: Work) -> dict[str, Value]:
    data = work.data / "mutations"
    table = work.folder / "scored.csv"
    write_scored(data / "beta_lactamase.csv.gz", table, "deep_sequence")
    settings = {"sequence": data / "beta_lactamase.fasta", "first_position": 24, "table": table}
    folds = ("--fit.folds", "random", "--fit.sizes", *_BETA_LACTAMASE_SIZES)
    _run(work, "fit", {**settings, "zero_shot_column": "deep_sequence"}, *folds)
    evaluation = work.read("fit/evaluation.json")
    values = {}
    for size in _BETA_LACTAMASE_SIZES:
        own = evaluation[f"Folds random, {size} training mutants"]
        values[str(size)] = Value(value=own["metrics"]["spearman"], interval=own["intervals"]["spearman"])
        values[f"{size}: prior"] = Value(value=own["baselines"]["zero-shot score"]["metrics"]["spearman"])
    return values


def write_scored(source: Path, target: Path, column: str) -> None:
    """The rows of a table that have a value in this column."""
    rows = pd.read_csv(source, dtype=str, keep_default_na=False)
    rows[rows[column] != ""].to_csv(target, index=False)


BENCHMARKS = (
    PublicBenchmark(
        name="metl",
        title="Measured mutants: METL",
        data="six deep mutational scans: DLG4 (abundance, binding), GRB2, PAB1, PTEN (abundance, activity); "
        "gitter-lab/metl-pub, MIT",
        split="64, 256 or 1,024 mutants at random to fit, all others to predict; campaigns of five plates of 96",
        metrics=(
            *(Metric(f"mean {size}", f"Spearman, mean of six, {size} mutants", f"mean {size}: EVE") for size in SIZES),
            *(Metric(f"{assay} 256", f"{assay}, 256 mutants", f"{assay} 256: EVE", RIDGE[assay]) for assay in RIDGE),
            Metric("found", "best 1 % found in five plates", "found: zero-shot"),
        ),
        baseline="EVE's score alone, which is also what a fit is given; for the plates greedy by it",
        source="ridge on one-hot, computed on these files",
        differs="METL's own values are of other draws of the training mutants",
        measure=_assays,
    ),
    PublicBenchmark(
        name="beta_lactamase",
        title="Measured mutants: beta-lactamase",
        data="Stiffler et al. 2015, 4,788 single mutants that have a score of DeepSequence; facebookresearch/esm, MIT",
        split="five folds at random, so many mutants of each training part",
        metrics=tuple(
            Metric(str(size), f"Spearman, {size} mutants", f"{size}: prior") for size in _BETA_LACTAMASE_SIZES
        ),
        baseline="DeepSequence's score alone, which is also what a fit is given",
        source="none on these folds",
        differs="values of ProteinGym are of zero-shot scores, or of folds of its own",
        measure=_beta_lactamase,
    ),
)
