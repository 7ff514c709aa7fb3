"""Find the largest token budget that fits into memory, and the fastest one.

Trains a few steps with one budget after the other, on your own data, with your model, precision and ZeRO stage, on as
many workers as training would take: the experiment's own first, doubled until one does not fit, then between the last
two, then smaller ones, which may be faster. Prints a table and the keys to set. Nothing is saved, and no run is
touched. A step is one batch of each worker here; batch.global_tokens does not change what fits.

On the CPU the memory is that of each worker's process: training.cpu_memory_limit_mib, else its part of the machine's.
--inference measures forward passes alone, without gradients and optimizer.

Ends within a minute from when the data is ready: no further budget is begun that would end later than 50 s after that,
or as --seconds says, the start of the workers included. The first one is measured in any case, however long it takes.

Examples:
  esmeray tune tokens --config train_config/masked_lm.yaml
  esmeray tune tokens --config train_config/masked_lm.yaml --workers 2 --deepspeed.stage 2
  esmeray tune tokens --config train_config/masked_lm.yaml --inference --training.precision bf16
  esmeray tune tokens --config train_config/esm2ae.yaml --training.cpu_memory_limit_mib 4000
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field
from rich.table import Table
from rich.text import Text

from cluster.signals import StopSignals
from common.arguments import ToolArguments
from common.command_line import result_console
from common.errors import ResourceError
from common.progress import conversion_bar, status_line
from train_config.loading import load_config
from train_config.overrides import parse_with_settings
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE
from train_config.tune_schema import MeasurementSection

if TYPE_CHECKING:
    from train_config.schema import Config
    from tuning.budgets import Found

_MEASUREMENT = MeasurementSection(warmup_steps=1, window_s=0.5, max_windows=3, agreement=0.1, timeout_s=120.0)


class Arguments(ToolArguments):
    """The experiment, and how to search. Settings of the experiment follow as --section.key VALUE."""

    config: Path = Field(description="The experiment's YAML file.")
    inference: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Forward passes alone, without gradients."
    )
    workers: int | None = Field(None, gt=0, description="Workers, one a device. Default: as ray.num_workers says.")
    memory_margin: float = Field(0.08, ge=0, lt=1, description="Share of the memory to leave free.")
    seconds: float = Field(50.0, gt=0, description="Seconds by which the last budget has to be measured.")


def main(argv: list[str]) -> int:
    """Search, print the table and what to set."""
    arguments, overrides = parse_with_settings(Arguments, argv, "tune tokens", __doc__)
    config = load_config(arguments.config, overrides)
    if arguments.workers is not None:
        config = config.model_copy(update={"ray": config.ray.model_copy(update={"num_workers": arguments.workers})})
    console = result_console()
    signals = StopSignals()
    try:
        with signals, status_line() as show:
            heading, found, workers = _searched(arguments, config, signals, show)
    except (KeyboardInterrupt, SystemExit) as error:
        signum = signals.behind(error)
        if signum is None:
            raise
        print("interrupted: the workers are ended", file=sys.stderr)
        return 128 + signum

    console.print(Text(heading), Text(), _table(found), sep="\n")
    if not found.fitting:
        raise ResourceError(_nothing_fits(found))
    lines = [
        *_fitting(found, arguments.memory_margin),
        *_to_set(found, config.batch.global_tokens, workers, arguments.inference),
    ]
    console.print(Text("\n" + "\n".join(lines)))
    return 0


def _searched(
    arguments: Arguments, config: Config, signals: StopSignals, show: Callable[[str], None]
) -> tuple[str, Found, int]:
    """Return what was measured on what, the result, and the number of workers."""
    from cluster.placement import find, place_workers
    from run_folder.paths import RunFolder
    from train_config.natures import with_absolute_paths
    from training.tasks.registry import task_plan

    # A run folder of this search alone, beside the runs: a classifier's tokenizer has to lie in one.
    run = RunFolder(config.run.storage_path, f"tune-tokens-{os.getpid()}")
    section = config.run.model_copy(update={"name": run.path.name})
    config = with_absolute_paths(config.model_copy(update={"run": section}))
    find(config.ray)
    try:
        task = task_plan(config)
        with conversion_bar("preparing the data") as progress:
            store_path = task.prepare(run.stores, progress)
        task.write_names(run, store_path)
        tokens = task.measure(store_path).data.tokens
        deadline = time.monotonic() + arguments.seconds
        show("starting Ray")
        from cluster import connection  # here: Ray and torch, which no refusal of config or data waits for

        with connection.connected(config.ray):
            signals.reinstall()
            workers = place_workers(config.ray, connection.cluster_resources())
            found = _search(arguments, config, store_path, workers.count, -(-tokens // workers.count), show, deadline)
    finally:
        shutil.rmtree(run.path, ignore_errors=True)
    heading = (
        f"{config.model.backbone.source}, {config.model.task}, {'inference' if arguments.inference else 'training'} in "
        f"{config.training.precision}: {workers.count} worker{'s' if workers.count > 1 else ''} on {workers.device}, "
        f"{workers.cpus_each} CPU core{'s' if workers.cpus_each > 1 else ''} each"
    )
    return heading, found, workers.count


def _search(
    arguments: Arguments,
    config: Config,
    store_path: Path,
    workers: int,
    largest: int,
    show: Callable[[str], None],
    deadline: float,
) -> Found:
    from tuning.budgets import search_budgets
    from tuning.pool import MeasuringPool
    from tuning.settings import Measurement, Settings

    settings = Settings.of(config, workers)
    with MeasuringPool(config, store_path, keep_global_tokens=False, inference=arguments.inference) as pool:

        def measure(tokens: int) -> Measurement:
            show(f"{tokens:,} tokens a batch")
            return pool.measure(replace(settings, tokens=tokens), _MEASUREMENT)

        return search_budgets(
            measure,
            smallest=config.data.max_length + SPECIAL_TOKENS_PER_SEQUENCE,
            largest=largest,
            own=config.batch.tokens,
            memory_margin=arguments.memory_margin,
            deadline=deadline,
        )


def _table(found: Found) -> Table:
    """A row a budget."""
    columns = Table(box=None, pad_edge=False)
    for name in ("batch.tokens", "tokens/s", "peak memory", "fits"):
        columns.add_column(name, justify="right" if name != "fits" else "left")
    columns.add_column("")
    results, expected_bytes = found.budgets.results, found.budgets.expected_bytes
    for tokens in sorted(results.keys() | expected_bytes):
        if tokens not in results:
            columns.add_row(f"{tokens:,}", "", f"~ {_mib(expected_bytes[tokens])}", "no", "not tried")
            continue
        measurement = results[tokens]
        columns.add_row(
            f"{tokens:,}",
            "" if measurement.tokens_per_s is None else f"{measurement.tokens_per_s:,.0f}",
            "" if measurement.peak_memory_bytes is None else _mib(measurement.peak_memory_bytes),
            "yes" if tokens in found.fitting else "no",
            "" if measurement.status == "ok" else measurement.reason,
        )
    return columns


def _fitting(found: Found, memory_margin: float) -> Iterator[str]:
    """Lines that say which budget is the largest that fits, and which the fastest."""
    largest, fastest = max(found.fitting), found.fastest
    peak, total = found.fitting[largest].peak_memory_bytes, found.fitting[largest].total_memory_bytes
    memory = "" if peak is None or total is None else f": {_mib(peak)} of {_mib(total)}, {memory_margin:.0%} left free"
    yield f"largest that fits  {largest:,} tokens{memory}"
    if largest == found.largest:
        yield "                   no batch could be larger: it is a worker's part of all training sequences"
    elif found.larger_left:
        yield "                   more may fit: the time was over (raise --seconds)"
    if found.own > found.largest:
        yield (
            f"not measured       {found.own:,} tokens, the experiment's own budget: "
            f"batches would not fill it, as a worker's part of all training sequences is {found.largest:,}"
        )
    if len(found.fitting) > 1:
        yield f"fastest            {fastest:,} tokens: {found.fitting[fastest].tokens_per_s:,.0f} tokens/s"
    else:
        reason = "the time was over (raise --seconds)" if found.ran_out_of_time else "no other budget fits"
        yield f"fastest            not known: {reason}"


def _to_set(found: Found, global_tokens: int, workers: int, inference: bool) -> Iterator[str]:
    if len(found.fitting) == 1 and found.ran_out_of_time:
        return
    if inference:
        yield f"set                --batch-tokens {found.fastest} where a tool or pipeline predicts"
        return
    at_once = found.fastest * workers
    steps = max(1, round(global_tokens / at_once))
    yield f"set                --batch.tokens {found.fastest} --batch.global_tokens {steps * at_once}"
    if steps * at_once != global_tokens:
        dividing = [tokens for tokens in found.fitting if global_tokens % (tokens * workers) == 0]
        best = max(dividing, key=lambda tokens: found.fitting[tokens].tokens_per_s or 0.0, default=None)
        keeps = f"--batch.tokens {best} keeps" if best else "a budget that divides it would keep"
        yield f"                   {keeps} batch.global_tokens {global_tokens}, on which results depend"


def _nothing_fits(found: Found) -> str:
    """Return why no budget fits, and what to change."""
    first, measurement = min(found.budgets.results.items())
    if found.ran_out_of_time:
        return f"batch.tokens {first}: does not fit, and no time was left for a smaller budget: raise --seconds"
    if measurement.status not in ("ok", "out_of_memory"):
        return f"batch.tokens {first}: no budget could be measured ({measurement.reason})"
    return (
        f"batch.tokens {first}, which holds one sequence of data.max_length, does not fit: lower data.max_length, set "
        "model.backbone.gradient_checkpointing true, or take a smaller model"
    )


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / 2**20:,.0f} MiB"
