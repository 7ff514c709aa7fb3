"""Measure a trained classifier: speed and memory by batch size, accuracy, and what takes the time.

Writes a folder:
  baseline_metrics.json          everything as numbers
  detailed_metrics.csv           a row for each batch that was measured
  baseline_summary_report.txt    latency, throughput, best batch size, memory, bottlenecks, accuracy, in words
  plots/                         batch_size_comparison.png and metrics_heatmap.png
  profiler_traces/               trace.json (open it at ui.perfetto.dev) and stacks.txt (for a flame graph)

Steps can be left out and run again one by one, with --overwrite: the others' results stay. Times are from texts to
probabilities on the host; a batch size that runs out of memory is a row that says so. Close what else uses the machine.

Examples:
  python -m tools profile_classifier runs/locations --data held_out.fasta
  python -m tools profile_classifier my-classifier --data proteins.csv --batch-sizes 1 32 256 --amp-dtype bf16
  python -m tools profile_classifier runs/locations --data held_out.fasta --steps trace plots
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import tyro
from pydantic import Field, PositiveInt
from rich.console import Console
from rich.text import Text

from common.errors import ConfigError, EsmerayError
from common.publishing import made_folder, refuse_existing
from inference.options import PipelineOptions, load_pipeline
from train_config.overrides import parse_with_settings
from train_config.section import Overrides

if TYPE_CHECKING:
    from dataset.labels.label_space import LabelSpace
    from inference.classifier import ClassifierPipeline
    from inference.classifier_profile import BatchResult
    from inference.labelled import LabelledTexts
from train_config.schema import Config

Step = Literal["batch_sizes", "whole_file", "trace", "plots"]
STEPS: tuple[Step, ...] = get_args(Step)

METRICS_FILE, DETAILS_FILE, SUMMARY_FILE = (
    "baseline_metrics.json",
    "detailed_metrics.csv",
    "baseline_summary_report.txt",
)
PLOTS_FOLDER, TRACES_FOLDER = "plots", "profiler_traces"
MADE_BY = "profile_classifier"
_FORMAT_VERSION = 1
_UNWRAPPED_WIDTH = 10_000
_TRACED_BATCH = 8
_DETAILS = ("sequences", "tokens", "longest", "prepare_ms", "compute_ms", "latency_ms", "latency_per_sample_ms")


class Arguments(PipelineOptions):
    """What to measure, and how often."""

    data: str = Field(description="File whose records are taken; labelled as for evaluate, or see --unlabelled.")
    output: Path | None = Field(None, description="Folder of the results. Default: profile-MODEL, here.")
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace the folder, or its results of these steps, if a profile that nobody changed since."
    )
    steps: list[Step] = Field(list(STEPS), min_length=1, description="What to do.")
    batch_sizes: list[PositiveInt] = Field([1, 4, 8, 16, 32, 64], min_length=1, description="Records of a batch.")
    token_budgets: list[PositiveInt] = Field([], description="Tokens of a batch, in place of --batch-sizes.")
    warmup_runs: int = Field(3, ge=0, description="Batches of each size that don't count.")
    runs: int = Field(20, gt=0, description="Batches of each size that are measured.")
    unlabelled: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Don't look for labels, so that there is no accuracy."
    )


def main(argv: list[str]) -> int:
    """Load, do the steps, write and print the summary."""
    arguments, overrides = parse_with_settings(Arguments, argv, "profile_classifier", __doc__)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above those of torch's profiler, which tells of start and stop
    # Here, so that --help and a wrong option answer at once.
    from inference.exported import config_of, label_space_of, model_folder
    from tools._profile_classifier.summary import summary_lines

    output = (arguments.output or Path(f"profile-{arguments.model.name}")).absolute()
    space = label_space_of(arguments.model)
    config = config_of(arguments.model, overrides)
    refuse_existing(output, MADE_BY, arguments.overwrite)
    profile = _known_profile(output, _subject(arguments, model_folder(arguments.model)), arguments.steps)
    if "plots" in arguments.steps and not {"batch_sizes"} & {*arguments.steps, *profile["steps"]}:
        raise ConfigError("--steps plots: there are no batch sizes to draw; run it with --steps batch_sizes plots")
    texts = _texts(arguments, config, space, overrides)
    pipeline = load_pipeline(arguments, config)
    with made_folder(output, MADE_BY, arguments.overwrite) as building, _showing() as show:
        if profile["steps"]:
            shutil.copytree(output, building, dirs_exist_ok=True)
        for folder in (PLOTS_FOLDER, TRACES_FOLDER):
            (building / folder).mkdir(exist_ok=True)
        broken_off = None
        try:
            profile_steps(arguments, pipeline, texts, building, profile, show)
        except (EsmerayError, KeyboardInterrupt) as error:
            if not profile["steps"]:
                raise
            broken_off = error  # the steps that were done are kept
        (building / METRICS_FILE).write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
        summary = "\n".join(summary_lines(profile)) + "\n"
        (building / SUMMARY_FILE).write_text(summary, encoding="utf-8")
    if broken_off is not None:
        raise broken_off
    # Into a file or pipe nothing is wrapped.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _UNWRAPPED_WIDTH)
    console.print(Text(summary))
    console.print(Text(f"written: {output}/{METRICS_FILE}, {DETAILS_FILE}, {SUMMARY_FILE}, plots, profiler_traces"))
    return 0


def profile_steps(
    arguments: Arguments,
    pipeline: ClassifierPipeline,
    texts: LabelledTexts,
    output: Path,
    profile: dict[str, Any],
    show: Callable[[str], None],
) -> None:
    """Do the steps that are asked for, in their order, and put their results into ``profile``."""
    from inference.classifier_profile import describe

    profile["model"] = describe(pipeline)
    profile["data"] = {
        "samples": len(texts.texts),
        "tokens_per_sample": float(pipeline.token_lengths(texts.texts).mean()),
    }
    steps = profile["steps"]
    for step in STEPS:
        if step not in arguments.steps:
            continue
        show(step)
        if step == "batch_sizes":
            steps[step] = _batch_sizes(arguments, pipeline, texts, output, show)
        elif step == "whole_file":
            steps[step] = _whole_file(pipeline, texts, show)
        elif step == "trace":
            steps[step] = _trace(pipeline, texts, output, steps.get("batch_sizes"))
        else:
            _plots(output, profile)


def _batch_sizes(
    arguments: Arguments,
    pipeline: ClassifierPipeline,
    texts: LabelledTexts,
    output: Path,
    show: Callable[[str], None],
) -> dict[str, Any]:
    from inference.classifier_profile import measure_batches

    unit: Literal["batch_size", "batch_tokens"] = "batch_tokens" if arguments.token_budgets else "batch_size"
    results = list(
        measure_batches(
            pipeline,
            texts.texts,
            unit=unit,
            values=arguments.token_budgets or arguments.batch_sizes,
            warmup_runs=arguments.warmup_runs,
            runs=arguments.runs,
            show=show,
        )
    )
    (output / DETAILS_FILE).write_text(_details(unit, results), encoding="utf-8")
    return {
        "unit": unit,
        "warmup_runs": arguments.warmup_runs,
        "runs": arguments.runs,
        "rows": [result.summary() for result in results],
    }


def _details(unit: str, results: list[BatchResult]) -> str:
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([unit, "run", *_DETAILS, "error"])
    for result in results:
        if result.error is not None:
            rows.writerow([result.value, "", *([""] * len(_DETAILS)), result.error])
        for number, run in enumerate(result.runs, 1):
            times = (run.prepare_s, run.compute_s, run.latency_s, run.latency_s / run.sequences)
            milliseconds = [f"{1e3 * seconds:.6g}" for seconds in times]
            rows.writerow([result.value, number, run.sequences, run.tokens, run.longest, *milliseconds, ""])
    return text.getvalue()


def _whole_file(pipeline: ClassifierPipeline, texts: LabelledTexts, show: Callable[[str], None]) -> dict[str, Any]:
    from inference.classifier_profile import measure_whole
    from inference.labelled import kept_rows
    from model.metrics.classification import classification_metrics

    facts, predictions = measure_whole(
        pipeline, texts.texts, lambda done, total: show(f"whole_file: {done:,} of {total:,}")
    )
    figures: dict[str, float] = {}
    if texts.targets.size:
        rows = kept_rows(predictions)
        targets = texts.targets if rows is None else texts.targets[rows]
        figures = classification_metrics(pipeline.label_space.kind, predictions.probabilities, targets)
    return {**facts, "figures": figures}


def _trace(
    pipeline: ClassifierPipeline, texts: LabelledTexts, output: Path, batch_sizes: Mapping[str, Any] | None
) -> dict[str, Any]:
    from inference.classifier_profile import TRACED_RUNS, plain, trace
    from tools._profile_classifier.summary import best_row

    best = best_row(batch_sizes) if batch_sizes is not None else None
    size = round(best["sequences_per_batch"]) if best is not None else _TRACED_BATCH
    bottlenecks = trace(pipeline, texts.texts, output / TRACES_FOLDER, size)
    return {"batch_size": size, "runs": TRACED_RUNS, "bottlenecks": plain(bottlenecks)}


def _plots(output: Path, profile: Mapping[str, Any]) -> None:
    from tools._profile_classifier.pictures import draw_comparison, draw_heatmap

    measured = profile["steps"]["batch_sizes"]
    title = f"{profile['subject']['model']} on {profile['model']['device']}, {profile['model']['amp_dtype']}"
    draw_comparison(output / PLOTS_FOLDER / "batch_size_comparison.png", measured["rows"], measured["unit"], title)
    draw_heatmap(output / PLOTS_FOLDER / "metrics_heatmap.png", measured["rows"], measured["unit"], title)


def _subject(arguments: Arguments, folder: Path) -> dict[str, Any]:
    """What results have to agree in to stand beside each other."""
    from model.export.exported_folder import WEIGHTS_FILE

    return {
        "model": str(arguments.model),
        "weights": hashlib.sha256((folder / WEIGHTS_FILE).read_bytes()).hexdigest()[:16],
        "data": arguments.data,
        "device": arguments.device or "default",
        "amp_dtype": arguments.amp_dtype,
    }


def _known_profile(output: Path, subject: dict[str, Any], steps: list[Step]) -> dict[str, Any]:
    """What the folder holds, to be added to; or an empty profile, where all steps are to be done anyway.

    Raises:
        ConfigError: some steps are asked for, and the others' results are of another model, file or device.
    """
    path = output / METRICS_FILE
    empty = {"format_version": _FORMAT_VERSION, "subject": subject, "steps": {}}
    if set(steps) == set(STEPS) or not path.is_file():
        return empty
    try:
        profile = json.loads(path.read_text(encoding="utf-8"))
        same = profile["format_version"] == _FORMAT_VERSION and profile["subject"] == subject
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: is damaged ({type(error).__name__}); remove it or choose another --output"
        ) from error
    if not same:
        raise ConfigError(
            f"{path}: is of another model, file, device or precision; choose another --output, or do all steps"
        )
    return dict(profile)


def _texts(arguments: Arguments, config: Config, space: LabelSpace, overrides: Overrides) -> LabelledTexts:
    """The file's records; without targets where these are not asked for."""
    from inference.labelled import read_texts, read_unlabelled

    if arguments.unlabelled:
        return read_unlabelled([arguments.data], config)
    return read_texts([arguments.data], config, space, overrides=overrides)


@contextmanager
def _showing() -> Iterator[Callable[[str], None]]:
    """A line on stderr with what is being measured, where stderr is a terminal."""
    console = Console(file=sys.stderr)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield lambda text: status.update(Text(text))
