"""Evaluate predicted terms of proteins as CAFA does, with intervals.

Prints, for each aspect of the ontology, Fmax, Smin, area under the precision-recall curve and coverage with 95 %
intervals; those that end in _w weight terms by information accretion. Values are those of cafaeval 1.3. With --output,
a folder is written with evaluation.json, curves.tsv and curves.png.

Examples:
  esmeray function evaluate predictions.tsv --truth truth.tsv --ontology go-basic.obo
  esmeray function evaluate predictions.tsv --truth truth.tsv --ontology go-basic.obo --output evaluation
"""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic import Field
from rich.table import Table

from common.arguments import parse
from common.command_line import result_console
from common.errors import ConfigError, DataError
from common.publishing import made_folder, refuse_existing
from common.text import counted
from function.annotations import (
    EXPERIMENTAL,
    Unknown,
    information_accretion,
    read_accretion,
    read_annotations,
    read_scores,
    read_terms,
)
from function.evaluation import Evaluation, Settings, evaluate
from function.ontology import read_ontology

log = logging.getLogger(__name__)

MADE_BY = "evaluate_function"


class Arguments(Settings):
    """Files and choices of an evaluation."""

    predictions: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PREDICTIONS")] = Field(
        description="TSV of protein, term and score in 0 to 1."
    )
    truth: Path = Field(description="Annotations to evaluate by: TSV of protein and term, or GAF 2.2.")
    ontology: Path = Field(description="Ontology, OBO.")
    ia: Path | None = Field(None, description="TSV of term and information accretion.")
    ia_from: Path | None = Field(None, description="Annotations to compute information accretion from instead.")
    known: Path | None = Field(None, description="Annotations known before, which do not count (partial knowledge).")
    terms: Path | None = Field(None, description="File of the terms that count, one a line. Default: all.")
    aspect: str | None = Field(None, description="The only aspect that the files may have, such as molecular_function.")
    unknown: Unknown = Field(
        "refuse", description="Lines with terms that the ontology does not have, or proteins without annotation."
    )
    evidence: tuple[str, ...] = Field((), description="Evidence codes to take from GAF. Default: experimental ones.")
    since: str = Field("", pattern=r"^(\d{8})?$", description="First date to take from GAF, YYYYMMDD.")
    before: str = Field("", pattern=r"^(\d{8})?$", description="First date not to take from GAF, YYYYMMDD.")
    output: Path | None = Field(None, description="Folder to write.")
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace the folder if this tool made it and nobody changed it since."
    )


def main(argv: list[str]) -> int:
    """Read, evaluate, print, write."""
    arguments = parse(Arguments, argv, "function evaluate", __doc__)
    if arguments.ia and arguments.ia_from:
        raise ConfigError("--ia and --ia-from exclude each other; give one")
    if arguments.output is not None:
        refuse_existing(arguments.output, MADE_BY, arguments.overwrite)
    evaluations = _evaluated(arguments)
    _print(evaluations)
    if arguments.output is not None:
        with made_folder(arguments.output, MADE_BY, arguments.overwrite) as building:
            _write(building, evaluations, arguments)
    return 0


def _evaluated(arguments: Arguments) -> dict[str, Evaluation]:
    ontology = read_ontology(arguments.ontology)
    unknown, evidence = arguments.unknown, arguments.evidence or EXPERIMENTAL
    read = partial(read_annotations, ontology=ontology, unknown=unknown, evidence=evidence)
    truth = read(arguments.truth, aspect=arguments.aspect, since=arguments.since, before=arguments.before)
    known = read(arguments.known) if arguments.known else {}
    terms = read_terms(arguments.terms, ontology, unknown) if arguments.terms else {}
    accretion = read_accretion(arguments.ia, ontology, unknown) if arguments.ia else {}
    for name, one in read(arguments.ia_from).items() if arguments.ia_from else ():
        accretion[name] = information_accretion(one, ontology.aspects[name])
    proteins = {name: some.proteins for name, some in truth.items()}
    scores = read_scores(arguments.predictions, ontology, proteins, aspect=arguments.aspect, unknown=unknown)
    found = {
        name: evaluate(
            ontology.aspects[name],
            truth[name],
            scores[name],
            accretion_V=accretion.get(name),
            known=known.get(name),
            terms_V=terms.get(name),
            settings=arguments,
        )
        for name in scores
    }
    found = {name: one for name, one in found.items() if one.metrics}
    for name in sorted(truth.keys() - found.keys()):
        log.warning(
            "%s is left out: nothing is left to predict, or no score of such a protein reaches a threshold", name
        )
    if not found:
        problem = "no score reaches a threshold for a protein with annotations that count"
        raise DataError(f"{arguments.predictions}: {problem}; check it, the known annotations and the terms")
    return found


def _print(evaluations: dict[str, Evaluation]) -> None:
    console = result_console()
    for name, found in evaluations.items():
        table = Table("metric", "value", "95 % interval", "threshold")
        for metric, (value, interval, threshold) in found.metrics.items():
            between = f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else ""
            table.add_row(metric, f"{value:.3f}", between, "" if threshold is None else f"{threshold:.3g}")
        console.print(f"{name}: {counted(found.proteins, 'protein{s}')}, {found.predicted:,} with predictions")
        console.print(table)


def _write(folder: Path, evaluations: dict[str, Evaluation], settings: Settings) -> None:
    from function.figure import draw_curves

    content: dict[str, Any] = {"settings": settings.model_dump(include=set(Settings.model_fields)), "aspects": {}}
    names = list(dict.fromkeys(name for found in evaluations.values() for name in found.curves))
    lines = ["\t".join(["ns", "tau", *names])]
    for aspect, found in evaluations.items():
        metrics = {name: metric._asdict() for name, metric in found.metrics.items()}
        counts = {"proteins": found.proteins, "predicted": found.predicted}
        content["aspects"][aspect] = {**counts, "metrics": metrics}
        for place, threshold in enumerate(found.thresholds):
            values = [f"{found.curves[name][place]:.10g}" if name in found.curves else "" for name in names]
            lines.append("\t".join([aspect, f"{threshold:.6g}", *values]))
    (folder / "evaluation.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (folder / "curves.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    draw_curves(evaluations, folder / "curves.png")
