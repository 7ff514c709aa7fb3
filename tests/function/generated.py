"""Generated ontologies, annotations and predictions with awkward properties, and cafaeval's results for them.

cafaeval is GPL. Nothing here imports it: it runs as a program with its own interpreter, whose path is ESMERAY_CAFAEVAL.
"""

import json
import math
import os
import random
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from scipy.sparse import csr_array

from esmeray.function.annotations import Annotations, read_accretion, read_annotations, read_scores
from esmeray.function.evaluation import Evaluation, evaluate_functions
from esmeray.function.ontology import Method, Ontology, read_ontology
from esmeray.function.section import EvaluationSection, Normalisation

EXPECTED = Path(__file__).with_name("expected.json")
EXPECTED_CASES = 8
NAMESPACES = ("molecular_function", "biological_process", "cellular_component")
RUN = """
import json, runpy, sys
import pandas
write = pandas.DataFrame.to_csv
pandas.DataFrame.to_csv = lambda self, *given, **named: write(self, *given, **{**named, "float_format": "%.17g"})
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["cafaeval", *arguments]
    runpy.run_module("cafaeval", run_name="__main__")
"""
"""Program that runs cafaeval several times in one process and writes all digits."""


@dataclass
class Case:
    """Files and settings of one evaluation."""

    folder: Path
    norm: Normalisation = "cafa"
    propagation: Method = "max"
    orphans: bool = True
    step: float = 0.01
    accretion: bool = False

    @property
    def arguments(self) -> list[str]:
        """Command line arguments for cafaeval."""
        arguments = [self.folder / "terms.obo", self.folder / "predictions", self.folder / "truth.tsv"]
        arguments += ["-out_dir", self.folder / "results", "-norm", self.norm, "-prop", self.propagation]
        arguments += ["-th_step", self.step, "-threads", "1", *([] if self.orphans else ["-no_orphans"])]
        arguments += ["-ia", self.folder / "accretion.tsv"] if self.accretion else []
        return list(map(str, arguments))


def cafaeval(cases: list[Case]) -> list[dict[str, dict[str, list[float]]]]:
    """Run cafaeval; return, per case and aspect, the columns of evaluation_all.tsv."""
    python = Path(os.environ["ESMERAY_CAFAEVAL"]).with_name("python")
    arguments = json.dumps([case.arguments for case in cases])
    subprocess.run([python, "-c", RUN, arguments], check=True, capture_output=True, text=True)
    return [columns(case.folder / "results" / "evaluation_all.tsv") for case in cases]


def read(case: Case) -> tuple[Ontology, dict[str, Annotations], dict[str, csr_array]]:
    """Read the ontology, annotations and scores of a case."""
    ontology = read_ontology(case.folder / "terms.obo")
    truth = read_annotations(case.folder / "truth.tsv", ontology, unknown="ignore")
    proteins = {name: annotations.proteins for name, annotations in truth.items()}
    path = case.folder / "predictions" / "some.tsv"
    return ontology, truth, read_scores(path, ontology, proteins, unknown="ignore")


def evaluated(case: Case) -> dict[str, Evaluation]:
    """Evaluate a case with Esmeray; return the results by aspect."""
    ontology, truth, predictions = read(case)
    accretion = read_accretion(case.folder / "accretion.tsv", ontology, "ignore") if case.accretion else {}
    how = {"norm": case.norm, "propagation": case.propagation, "orphans": case.orphans, "step": case.step}
    settings = EvaluationSection(**how)
    found = {}
    for name, scores in predictions.items():
        aspect, weights_V = ontology.aspects[name], accretion.get(name)
        found[name] = evaluate_functions(aspect, truth[name], scores, accretion_V=weights_V, settings=settings, draws=0)
    return {name: evaluation for name, evaluation in found.items() if evaluation.metrics}


def columns(path: Path) -> dict[str, dict[str, list[float]]]:
    """Read the columns of a cafaeval table by aspect; thresholds are in the column ``tau``."""
    if not path.exists():
        return {}
    by_aspect = pd.read_csv(path, sep="\t").drop(columns="filename").set_index("ns").groupby(level=0)
    return {aspect: rows.to_dict("list") for aspect, rows in by_aspect}


def generate(folder: Path, seed: int) -> Case:
    """Write a random case: missing terms, unknown proteins, repeats, ties at thresholds, several roots, lone terms."""
    chance = random.Random(seed)
    folder.mkdir()
    terms = _write_ontology(folder / "terms.obo", chance)
    proteins = [f"P{number}" for number in range(chance.randint(1, 40))]
    names = [*terms, "GO:9999998"]
    truth = [(chance.choice(proteins), chance.choice(names)) for _ in range(chance.randint(2, 120))]
    truth.append((proteins[0], chance.choice(list(terms))))
    _write(folder / "truth.tsv", truth)
    known, some = [protein for protein, _ in truth], [*proteins, "X1", "X2"]
    (folder / "predictions").mkdir()
    rows = [(chance.choice(some), chance.choice(names), _score(chance)) for _ in range(chance.randint(0, 400))]
    rows += chance.sample(rows, len(rows) // 4) + [(protein, term, _score(chance)) for protein, term, _ in rows[::5]]
    rows += [(protein, term, "0.5") for protein in known for term in names[:1]]  # cafaeval fails if all scores are 0
    rows += [(chance.choice(known), term, "0.37") for term in chance.sample(names, len(names) // 2)]
    rows = [row for row in rows if float(row[2]) > 0 or chance.random() < 0.5]
    _write(folder / "predictions" / "some.tsv", rows)
    values = [(term, chance.choice([0, 0.0, 1.5, 1e-3, math.inf, chance.random() * 9])) for term in terms]
    _write(folder / "accretion.tsv", chance.sample(values, max(1, len(values) * 2 // 3)))
    return Case(
        folder,
        norm=chance.choice(["cafa", "pred", "gt"]),
        propagation=chance.choice(["max", "fill"]),
        orphans=chance.random() < 0.5,
        step=chance.choice([0.01, 0.01, 0.05, 0.001, 0.3]),
        accretion=chance.random() < 0.7,
    )


def _score(chance: random.Random) -> str:
    scores = [f"{chance.random():.17g}", f"{chance.randint(0, 100) / 100}", f"{chance.random():.3f}"]
    return chance.choice([*scores, "0", "1", "0.30", "0.001"])


def _write(path: Path, rows: list[tuple]) -> None:
    path.write_text("".join("\t".join(map(str, row)) + "\n" for row in rows))


def _write_ontology(path: Path, chance: random.Random) -> list[str]:
    """Write an ontology; return its terms and alternative ids."""
    stanzas, names, before = [], [], []
    for number in range(chance.randint(3, 60)):
        name, namespace = f"GO:{number:07d}", NAMESPACES[min(2, int(chance.random() * 4))]
        lines = [f"id: {name}", f"name: term {number}", f"namespace: {namespace}"]
        for parent in chance.sample(before, min(len(before), chance.choice([0, 1, 1, 1, 2, 3, 4]))):
            lines.append(chance.choice([f"is_a: {parent} ! a parent", f"relationship: part_of {parent}"]))
        lines += ["relationship: regulates GO:0000000"] * (chance.random() < 0.1)
        if chance.random() < 0.1 and number:
            lines.append("is_obsolete: true")
        else:
            names.append(name)
            if chance.random() < 0.15:
                lines.append(f"alt_id: GO:1{number:06d}")
                names.append(f"GO:1{number:06d}")
        before.append(name)
        stanzas.append(lines)
    chance.shuffle(stanzas)
    text = "\n\n".join("\n".join(["[Term]", *lines]) for lines in stanzas)
    path.write_text(f"format-version: 1.2\n\n{text}\n\n[Typedef]\nid: part_of\nname: part of\n")
    return names


def sampled(found: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, list[float]]]:
    """Select the rows of the first, middle and last thresholds."""
    return {
        aspect: {name: [values[0], values[len(values) // 2], values[-1]] for name, values in table.items()}
        for aspect, table in found.items()
    }


if __name__ == "__main__":  # rewrites EXPECTED: ESMERAY_CAFAEVAL=PROGRAM python -m tests.function.generated
    with tempfile.TemporaryDirectory() as folder:
        made = cafaeval([generate(Path(folder) / str(seed), seed) for seed in range(EXPECTED_CASES)])
    EXPECTED.write_text("[\n" + ",\n".join(json.dumps(sampled(each)) for each in made) + "\n]\n")
