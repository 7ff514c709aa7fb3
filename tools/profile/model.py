"""Measure where the time of a model goes, by stage, and its latency and memory by batch size, with advice.

MODEL is a folder, hub name or run, whose embeddings or predictions are measured; or the YAML file of an experiment,
which is trained for some seconds, and nothing is saved. A stage's limit is the device's FLOP/s (of its data sheet, or
of a large product measured here), or the bytes/s of a large copy; on the CPU, what stays in the cache may exceed that.
Times of a batch are from texts to results on the host. Close what else uses the machine.

A folder is written: profile.json, report.txt, trace.json (open it at ui.perfetto.dev), stacks.txt (for a flame graph);
with batch sizes also batches.csv, batches.png and heatmap.png.

Examples:
  esmeray profile model facebook/esm2_t6_8M_UR50D --data.source proteins.fasta
  esmeray profile model runs/locations --data.source held_out.fasta --profile.batch_sizes 1 32 256
  esmeray profile model train_config/esm2ae.yaml --data.source proteins.fasta
"""

from __future__ import annotations

import csv
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from common.command_line import result_console
from common.errors import ConfigError
from common.progress import status_line
from common.publishing import made_folder
from tools.grammar import Overwriting, example_of, parse_with_run
from train_config.command_schema import ModelProfileSection
from train_config.loading import load_config
from train_config.section import Overrides

if TYPE_CHECKING:
    from tools.profile._measure import Subject, Unit

MADE_BY = "profile model"


class Arguments(Overwriting):
    """The model."""

    model: str
    """Folder, hub name or run, or an experiment's file."""


def main(argv: list[str]) -> int:
    """Measure, write, and print the report."""
    arguments, settings, overrides = parse_with_run(argv, MADE_BY, __doc__, Arguments, ModelProfileSection)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above those of torch's profiler, which reports start and stop
    output = Path(settings.output or f"profile-{Path(arguments.model).stem}").absolute()
    is_experiment = arguments.model.endswith((".yaml", ".yml"))
    if not is_experiment and ("data", "source") not in overrides:
        raise ConfigError(f"missing: --data.source; {example_of(__doc__, MADE_BY)}")
    with made_folder(output, MADE_BY, arguments.overwrite) as building, status_line() as show:
        if is_experiment:
            from tools.profile._training import profile_training  # here: it loads torch and DeepSpeed

            show("training")
            profile = profile_training(load_config(arguments.model, overrides), building)
        else:
            profile = _profile(arguments.model, settings, overrides, building, show)
        lines = _write(profile, building)
    result_console().print(Text("\n".join(lines)), Text(f"written: {output}"), sep="\n")
    return 0


def _profile(
    name: str, settings: ModelProfileSection, overrides: Overrides, folder: Path, show: Callable[[str], None]
) -> dict[str, Any]:
    from tools.profile._measure import describe, measure_batches, profile_stages  # here: it loads torch

    show(f"opening {name}")
    subject, texts = _open(name, settings, overrides)
    show("tracing")
    profile = describe(subject.model) | profile_stages(subject, folder)
    if values := settings.token_budgets or settings.batch_sizes:
        unit: Unit = "tokens" if settings.token_budgets else "batch_size"
        subject = subject._replace(texts=texts)
        measured = measure_batches(subject, unit, values, settings.warmup_runs, settings.runs, show)
        rows = list(measured)
        profile["batch_sizes"] = {"unit": unit, "rows": rows}
    return profile


def _open(name: str, settings: ModelProfileSection, overrides: Overrides) -> tuple[Subject, list[str]]:
    """The model with a sample of its texts, spread over the lengths, and all texts."""
    from inference.models.opening import open_model
    from model.device import choose_device
    from tools.profile._measure import Subject, spread
    from train_config.embed_schema import EmbedSection

    device = settings.device or choose_device(0).type
    given = EmbedSection(tokens=settings.tokens, precision=settings.precision)
    resolved = given.resolved(device == "cuda")
    assert resolved.precision is not None and resolved.tokens is not None
    model = open_model(name, resolved.precision, device, random_weights=settings.random_weights)
    outputs = settings.outputs or ["classes" if "classifier" in model.heads else "mean"]
    texts = _texts(name, "classifier" in model.heads, overrides)
    subject = Subject(model, texts, model.outputs(outputs), resolved.tokens)
    tokens_each = float(subject.token_counts(texts).mean())
    sample = spread(texts, round(settings.batches * subject.tokens / tokens_each) or 1)
    return subject._replace(texts=sample), texts


def _texts(name: str, is_classifier: bool, overrides: Overrides) -> list[str]:
    """Texts of a classifier as it reads them, others of proteins."""
    if is_classifier:
        from inference.classify.labelled import read_unlabelled
        from inference.models.source import config_of

        config = config_of(name, overrides)
        return read_unlabelled(config.data.source, config.data, config.model.tokenizer).texts
    from dataset.store.conversion import open_store

    data = load_config(None, overrides).data
    with tempfile.TemporaryDirectory() as scratch:
        store = open_store(data.source, data.ingest, Path(scratch))
        return [store.text(record) for record in range(len(store))]


def _write(profile: Mapping[str, Any], folder: Path) -> list[str]:
    """The files of the profile, and the lines of its report."""
    from tools.profile._report import draw_batches, draw_heatmap, report

    lines = list(report(profile))
    (folder / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "profile.json").write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
    if "batch_sizes" in profile:
        measured = profile["batch_sizes"]
        title = f"{profile['model']} on {profile['device']}, {profile['precision']}"
        draw_batches(folder / "batches.png", measured, title)
        draw_heatmap(folder / "heatmap.png", measured, title)
        _write_runs(folder / "batches.csv", measured)
    return lines


def _write_runs(path: Path, measured: Mapping[str, Any]) -> None:
    """A row for each batch, as CSV."""
    unit = measured["unit"]
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(
            file, [unit, "run", "sequences", "batch_tokens", "ms", "ms_per_sample", "error"], lineterminator="\n"
        )
        table.writeheader()
        for row in measured["rows"]:
            if row["error"]:
                table.writerow({unit: row[unit], "error": row["error"]})
            for number, run in enumerate(row["runs"], 1):
                table.writerow({unit: row[unit], "run": number, **run})
