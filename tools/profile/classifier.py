"""Measure a trained classifier: speed and memory by batch size, accuracy, and what takes the time.

Writes a folder:
  baseline_metrics.json          everything as numbers
  detailed_metrics.csv           a row for each batch that was measured
  baseline_summary_report.txt    latency, throughput, best batch size, memory, bottlenecks, accuracy, in words
  plots/                         batch_size_comparison.png, metrics_heatmap.png
  profiler_traces/               trace.json (open it at ui.perfetto.dev) and stacks.txt (for a flame graph)

Steps can be left out and run again one by one, with --overwrite: the others' results stay. Times are from texts to
probabilities on the host; a batch size that runs out of memory is a row that says so. Close what else uses the machine.

Examples:
  esmeray profile classifier runs/locations --data held_out.fasta
  esmeray profile classifier my-classifier --data proteins.csv --batch-sizes 1 32 256 --precision bf16
  esmeray profile classifier runs/locations --data held_out.fasta --steps trace plots
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import tyro
from pydantic import Field, PositiveInt
from rich.text import Text

from common.command_line import result_console
from common.progress import status_line
from common.publishing import made_folder, refuse_existing
from inference.exported import PipelineOptions, config_of, label_space_of
from inference.models.source import exported_by
from train_config.overrides import parse_with_settings

Step = Literal["batch_sizes", "whole_file", "trace", "plots"]
SUMMARY_FILE = "baseline_summary_report.txt"
MADE_BY = "profile_classifier"


class Arguments(PipelineOptions):
    """Subject and length of the measurement."""

    data: str = Field(description="File whose records are taken; labelled as for evaluate, or see --unlabelled.")
    output: Path | None = Field(None, description="Folder of the results. Default: profile-MODEL, here.")
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace the folder, or its results of these steps, if a profile that nobody changed since."
    )
    steps: list[Step] = Field(list(get_args(Step)), min_length=1, description="What to do.")
    batch_sizes: list[PositiveInt] = Field([1, 4, 8, 16, 32, 64], min_length=1, description="Records of a batch.")
    token_budgets: list[PositiveInt] = Field([], description="Tokens of a batch, in place of --batch-sizes.")
    warmup_runs: int = Field(3, ge=0, description="Batches of each size that don't count.")
    runs: int = Field(20, gt=0, description="Batches of each size that are measured.")
    unlabelled: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Don't look for labels, so that there is no accuracy."
    )


def main(argv: list[str]) -> int:
    """Load, do the steps, write and print the summary."""
    arguments, overrides = parse_with_settings(Arguments, argv, "profile classifier", __doc__)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above those of torch's profiler, which reports start and stop
    # Here, so that --help, a wrong option and a wrong model are answered at once: the steps load torch.
    from inference.classify.labelled import read_texts, read_unlabelled

    output = (arguments.output or Path(f"profile-{arguments.model.name}")).absolute()
    space = label_space_of(arguments.model)
    config = config_of(arguments.model, overrides)
    refuse_existing(output, MADE_BY, arguments.overwrite)
    from tools.profile._classifier.report import summary_lines
    from tools.profile._classifier.steps import DETAILS_FILE, METRICS_FILE, do_steps, known_profile

    profile = known_profile(output, _subject(arguments, exported_by("classifier", arguments.model)), arguments.steps)
    if arguments.unlabelled:
        texts = read_unlabelled([arguments.data], config.data, config.model.tokenizer)
    else:
        texts = read_texts([arguments.data], config.data, config.model.tokenizer, space, overrides=overrides)
    from inference.classifier import ClassifierPipeline  # here: it loads torch

    pipeline = ClassifierPipeline.of(arguments, config)
    batches = {
        "unit": "batch_tokens" if arguments.token_budgets else "batch_size",
        "values": arguments.token_budgets or arguments.batch_sizes,
        "warmup_runs": arguments.warmup_runs,
        "runs": arguments.runs,
    }
    with made_folder(output, MADE_BY, arguments.overwrite) as building, status_line() as show:
        if profile["steps"]:
            shutil.copytree(output, building, dirs_exist_ok=True)
        do_steps(arguments.steps, batches, pipeline, texts, building, profile, show)
        (building / METRICS_FILE).write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
        summary = "\n".join(summary_lines(profile)) + "\n"
        (building / SUMMARY_FILE).write_text(summary, encoding="utf-8")
    written = f"written: {output}/{METRICS_FILE}, {DETAILS_FILE}, {SUMMARY_FILE}, plots, profiler_traces"
    result_console().print(Text(summary), Text(written), sep="\n")
    return 0


def _subject(arguments: Arguments, folder: Path) -> dict[str, Any]:
    """Values in which results have to agree to stand beside each other."""
    from model.export.exported_folder import WEIGHTS_FILE

    return {
        "model": str(arguments.model),
        "weights": hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()[:16],
        "data": arguments.data,
        "device": arguments.device or "default",
        "precision": arguments.precision,
    }
