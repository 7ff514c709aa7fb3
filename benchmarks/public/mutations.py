"""Six deep mutational scans of METL (gitter-lab/metl-pub, MIT) with EVE's score as the prior: DLG4 (abundance and
binding), GRB2, PAB1, PTEN (abundance and activity).

Spearman's coefficient of the mutants that are left once 64, 256 or 1,024 at random are measured, and campaigns of five
plates. Everything is by ``esmeray mutations fit`` and ``campaign``, of all six in one command; features are one_hot, so
that no weights have a part.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean

import pandas as pd

from esmeray.benchmarks.harness.proteins import DEVELOPMENT_DATA
from esmeray.benchmarks.harness.stage import Row

METL = DEVELOPMENT_DATA / "mutations" / "metl"
SIZES = (64, 256, 1024)
PUBLISHED: dict[str, dict[int, float]] = {
    "dlg4-2022-abundance": {64: 0.505, 256: 0.561, 1024: 0.663},
    "dlg4-2022-binding": {64: 0.488, 256: 0.530, 1024: 0.645},
    "grb2-abundance": {64: 0.252, 256: 0.495, 1024: 0.704},
    "pab1": {64: 0.272, 256: 0.526, 1024: 0.806},
    "pten-abundance": {},
    "pten-activity": {},
}
"""Ridge on one-hot; of PTEN's single mutants it predicts nothing that was not measured."""


def measure(folder: Path, seeds: Sequence[int], data: Path = METL) -> list[Row]:
    """Rows of both tables. Outputs stay in ``folder``, and what is there by then is not computed again."""
    return [*_fits(folder, seeds, data), *_campaigns(folder, seeds, data)]


def _run(command: str, output: Path, data: Path, *options: object) -> Path:
    if not output.exists():
        settings = {
            "sequence": data / "wild_types.fasta",
            "table": data,
            "measured_column": "measured",
            "zero_shot_column": "eve",
            "features": "one_hot",
            "output": output,
        }
        words = [word for key, value in settings.items() for word in (f"--{command}.{key}", str(value))]
        subprocess.run(
            [sys.executable, "-m", "esmeray.tools", "mutations", command, "none", *words, *map(str, options)],
            stdout=sys.stderr,
            check=True,
        )
    return output


def _fits(folder: Path, seeds: Sequence[int], data: Path) -> Iterator[Row]:
    found = []
    for seed in seeds:
        options = ("--fit.folds", "rest", "--fit.sizes", *SIZES, "--fit.seed", seed, "--fit.bootstrap", 1)
        output = _run("fit", folder / f"fit-{seed}", data, *options)
        found.append(json.loads((output / "evaluation.json").read_text(encoding="utf-8")))
    for assay, ridge in PUBLISHED.items():
        for size in SIZES:
            evaluations = [by_size[f"Folds rest, {size} training mutants"][assay] for by_size in found]
            ours = [evaluation["metrics"]["spearman"] for evaluation in evaluations]
            covered = [evaluation["metrics"]["in 90 % interval"] for evaluation in evaluations]
            eve = mean(evaluation["baselines"]["zero-shot score"]["metrics"]["spearman"] for evaluation in evaluations)
            yield {
                "assay": assay,
                "training mutants": size,
                "esmeray mutations fit": _spread(ours),
                "EVE alone": f"{eve:.3f}",
                "ridge on one-hot": f"{ridge[size]:.3f}" if size in ridge else None,
                "above the better": f"{mean(ours) - max(eve, ridge.get(size, 0.0)):+.3f}",
                "in 90 % intervals": _spread(covered),
            }


def _campaigns(folder: Path, seeds: Sequence[int], data: Path) -> Iterator[Row]:
    output = _run("campaign", folder / "campaign", data, "--campaign.repeats", len(seeds))
    table = pd.read_csv(output / "campaign.csv")
    last = table[table["round"] == table["round"].max()]
    shares = last.pivot_table(index="protein", columns="way", values="found", sort=False)
    shares.loc["mean"] = shares.mean()
    for assay, row in shares.iterrows():
        ours, eve, chance = row["proposals"], row["greedy by the zero-shot score"], row["random"]
        yield {
            "assay": str(assay),
            "best 1 % found in five plates": f"{ours:.3f}",
            "by EVE": f"{eve:.3f}",
            "by chance": f"{chance:.3f}",
            "times EVE": f"{ours / eve:.1f}" if eve else None,
            "times chance": f"{ours / chance:.1f}" if chance else None,
        }


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"
