"""Measured mutants: six deep mutational scans of METL, with EVE's score as the prior, and beta-lactamase, with
DeepSequence's.

Spearman's coefficient of the remaining mutants once a random part is measured, and campaigns of five plates. Features
are one_hot, so no weights take part.
"""

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
"""References computed on each assay with 256 mutants; ridge predicts nothing for PTEN's single mutants."""
_CAMPAIGN = {"proposals": "found", "greedy by the zero-shot score": "found: zero-shot", "random": "found: random"}
_BETA_LACTAMASE_SIZES = (48, 96, 240)


def _fit(work: Work, settings: str) -> None:
    """Run ``esmeray mutations fit`` with output in the folder ``fit``."""
    work.run(
        f"mutations fit --fit.features one_hot --fit.output FOLDER/fit --fit.seed {work.seed} {settings}", makes="fit"
    )


def _assays(work: Work) -> dict[str, Value]:
    folder = "DATA/mutations/metl"
    tables = f"--fit.sequence {folder}/wild_types.fasta --fit.table {folder}"
    columns = "--fit.measured_column measured --fit.zero_shot_column eve"
    sizes = " ".join(map(str, SIZES))
    _fit(work, f"{tables} {columns} --fit.folds rest --fit.sizes {sizes}")
    evaluation = work.read("fit/evaluation.json")
    values: dict[str, Value] = {}
    for size in SIZES:
        folds = evaluation[f"Folds rest, {size} training mutants"]
        ours = {assay: folds[assay]["metrics"]["spearman"] for assay in RIDGE}
        eve = {assay: folds[assay]["baselines"]["zero-shot score"]["metrics"]["spearman"] for assay in RIDGE}
        for ending, spearman in (("", ours), (": EVE", eve)):
            values |= {f"{assay} {size}{ending}": Value(value=value) for assay, value in spearman.items()}
            values[f"mean {size}{ending}"] = Value(value=mean(spearman.values()))
    work.run(
        f"mutations campaign FOLDER/fit --campaign.output FOLDER/campaign --campaign.seed {work.seed}", makes="campaign"
    )
    table = pd.read_csv(work.folder / "campaign" / "campaign.csv")
    means = table[table["round"] == table["round"].max()].groupby("way")["found"].mean()
    return values | {name: Value(value=means[way]) for way, name in _CAMPAIGN.items()}


def _beta_lactamase(work: Work) -> dict[str, Value]:
    rows = pd.read_csv(work.data / "mutations" / "beta_lactamase.csv.gz", dtype=str, keep_default_na=False)
    rows[rows["deep_sequence"] != ""].to_csv(work.folder / "scored.csv", index=False)
    tables = "--fit.sequence DATA/mutations/beta_lactamase.fasta --fit.first_position 24 --fit.table FOLDER/scored.csv"
    sizes = " ".join(map(str, _BETA_LACTAMASE_SIZES))
    _fit(work, f"{tables} --fit.zero_shot_column deep_sequence --fit.folds random --fit.sizes {sizes}")
    evaluation = work.read("fit/evaluation.json")
    values = {}
    for size in _BETA_LACTAMASE_SIZES:
        fold = evaluation[f"Folds random, {size} training mutants"]
        values[str(size)] = Value(value=fold["metrics"]["spearman"], interval=fold["intervals"]["spearman"])
        values[f"{size}: prior"] = Value(value=fold["baselines"]["zero-shot score"]["metrics"]["spearman"])
    return values


BENCHMARKS = (
    PublicBenchmark(
        name="metl",
        title="Measured mutants: METL",
        about={
            "data": "six deep mutational scans: DLG4 (abundance, binding), GRB2, PAB1, PTEN (abundance, activity); "
            "gitter-lab/metl-pub, MIT",
            "split": "64, 256 or 1,024 mutants at random to fit, all others to predict; campaigns of five plates of 96",
            "plain baseline": "EVE's score alone, which a fit also gets; for the plates greedy by it",
            "published values": "ridge on one-hot, computed on these files",
            "not comparable": "METL's own values are of other draws of the training mutants",
        },
        metrics=(
            *(Metric(f"mean {size}", f"Spearman, mean of six, {size} mutants", f"mean {size}: EVE") for size in SIZES),
            *(Metric(f"{assay} 256", f"{assay}, 256 mutants", f"{assay} 256: EVE", RIDGE[assay]) for assay in RIDGE),
            Metric("found", "best 1 % found in five plates", "found: zero-shot"),
        ),
        measure=_assays,
    ),
    PublicBenchmark(
        name="beta_lactamase",
        title="Measured mutants: beta-lactamase",
        about={
            "data": "Stiffler et al. 2015, 4,788 single mutants that have a score of DeepSequence; "
            "facebookresearch/esm, MIT",
            "split": "five folds at random; that number of mutants of each training part",
            "plain baseline": "DeepSequence's score alone, which a fit also gets",
            "published values": "none on these folds",
            "not comparable": "values of ProteinGym are of zero-shot scores, or of folds of its own",
        },
        metrics=tuple(
            Metric(str(size), f"Spearman, {size} mutants", f"{size}: prior") for size in _BETA_LACTAMASE_SIZES
        ),
        measure=_beta_lactamase,
    ),
)
