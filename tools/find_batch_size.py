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
  python -m tools find_batch_size --config train_config/masked_lm.yaml
  python -m tools find_batch_size --config train_config/masked_lm.yaml --workers 2 --deepspeed.stage 2
  python -m tools find_batch_size --config train_config/masked_lm.yaml --inference --training.amp_dtype bf16
  python -m tools find_batch_size --config train_config/esm2ae.yaml --training.cpu_memory_limit_mib 4000
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from pydantic import Field
from rich.text import Text

from common.arguments import ToolArguments
from common.command_line import result_console
from common.errors import ResourceError
from common.progress import conversion_bar, status_line
from train_config.loading import load_config
from train_config.overrides import parse_with_settings
from train_config.schema import SPECIAL_TOKENS_PER_SEQUENCE
from train_config.tune_schema import MeasurementSection
from training.launch.signals import StopSignals

if TYPE_CHECKING:
    from run_folder.paths import RunFolder
    from train_config.schema import Config
    from tuning.budgets import Found
    from tuning.pool import MeasuringPool

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
    arguments, overrides = parse_with_settings(Arguments, argv, "find_batch_size", __doc__)
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
    from tools._find_batch_size.report import advice, nothing_fits, table  # here: torch, which no refusal waits for

    console.print(Text(heading), Text(), table(found), sep="\n")
    if not found.fitting:
        raise ResourceError(nothing_fits(found))
    lines = advice(found, config.batch.global_tokens, workers, arguments.memory_margin, arguments.inference)
    console.print(Text("\n" + "\n".join(lines)))
    return 0


def _searched(
    arguments: Arguments, config: Config, signals: StopSignals, show: Callable[[str], None]
) -> tuple[str, Found, int]:
    """Return what was measured on what, the result, and the number of workers."""
    from training.launch.driver import with_absolute_paths
    from training.launch.placement import place_workers
    from training.tasks.registry import task_plan

    with _own_folder(config) as run:
        config = with_absolute_paths(config.model_copy(update={"run": _named(config, run)}), run)
        task = task_plan(config)
        with conversion_bar("preparing the data") as progress:
            store_path = task.prepare(run.stores, progress)
        task.write_names(run, store_path)
        tokens = task.measure(store_path).data.tokens
        deadline = time.monotonic() + arguments.seconds
        show("starting Ray")
        from training.launch import (
            cluster,  # here: they import Ray and torch, which no refusal of config or data waits for
        )
        from tuning.pool import MeasuringPool

        with cluster.connected(config.ray):
            signals.reinstall()
            workers = place_workers(config.ray, cluster.cluster_resources())
            largest = -(-tokens // workers.count)
            show(f"starting {workers.count} worker{'s' if workers.count > 1 else ''} on {workers.device}")
            with MeasuringPool(config, store_path, keep_global_tokens=False, inference=arguments.inference) as pool:
                pool.start(workers.count)
                found = _search(arguments, config, pool, workers.count, largest, show, deadline)
    kind = "inference" if arguments.inference else "training"
    heading = (
        f"{config.model.backbone.source}, {config.model.task}, {kind} in {config.training.amp_dtype}: "
        f"{workers.count} worker{'s' if workers.count > 1 else ''} on {workers.device}, {workers.cpus_each} CPU "
        f"core{'s' if workers.cpus_each > 1 else ''} each"
    )
    return heading, found, workers.count


def _search(
    arguments: Arguments,
    config: Config,
    pool: MeasuringPool,
    workers: int,
    largest: int,
    show: Callable[[str], None],
    deadline: float,
) -> Found:
    from tuning.budgets import search_budgets
    from tuning.settings import Measurement, Settings

    settings = Settings.of(config, workers)

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


@contextmanager
def _own_folder(config: Config) -> Iterator[RunFolder]:
    """A run folder of this search alone, beside the runs: a classifier's tokenizer has to lie in one."""
    from run_folder.paths import RunFolder

    run = RunFolder(config.run.storage_path, f"find_batch_size-{os.getpid()}")
    try:
        yield run
    finally:
        shutil.rmtree(run.path, ignore_errors=True)


def _named(config: Config, run: RunFolder) -> object:
    return config.run.model_copy(update={"name": run.path.name})
