"""Profile of a training step by stage, measured by training with the config for some seconds in this process."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import schedule

from esmeray.cluster.collective import WorkerContext
from esmeray.common.errors import ResourceError
from esmeray.common.processor import default_precision
from esmeray.inference.profile.measuring import operators, profiler_of, write_trace
from esmeray.model.device import choose_device
from esmeray.monitoring.advice import Facts, advise
from esmeray.run_folder.paths import RunFolder
from esmeray.tasks.plan import task_plan
from esmeray.tools.profile._gpu_trial import single_process_group
from esmeray.training.config import Config, with_precision
from esmeray.training.launch.planning import check_task
from esmeray.tuning.section import MeasurementSection
from esmeray.tuning.trial import measure_on_worker

TRACED_STEPS = 3
_TRACED = MeasurementSection(window_s=0.01)


def profile_training(config: Config, folder: Path) -> dict[str, Any]:
    """Train with the config for some seconds, then trace some steps with the profiler.

    Writes the trace to ``folder``. Raises ResourceError if a step fails, and DataError and ConfigError as training
    does.
    """
    device = choose_device()
    config = with_precision(config, default_precision(device.type == "cuda"))
    if device.type == "cpu":  # as training does: otherwise DeepSpeed warns that it found no accelerator
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with tempfile.TemporaryDirectory() as scratch, single_process_group(device):
        # The store is made in the run's folder, where the run will need it. Everything else goes to a scratch folder.
        task = task_plan(config.data, config.model)
        check_task(task, config.training, config.deepspeed)
        store = str(task.prepare(RunFolder(config.run.storage_path, config.run.name).stores))
        config = config.model_copy(update={"run": config.run.model_copy(update={"storage_path": scratch})})
        context = WorkerContext(device=device)
        measurement = measure_on_worker(config, context, store, MeasurementSection())
        if measurement.status != "ok":
            raise ResourceError(f"no step could be measured: {measurement.reason}")
        on_cuda = device.type == "cuda"
        # Traced after measuring, because the profiler slows the steps.
        steps = schedule(wait=1, warmup=1, active=TRACED_STEPS, repeat=1)
        with profiler_of(
            on_cuda, schedule=steps, on_trace_ready=lambda profiler: write_trace(profiler, folder, on_cuda)
        ) as traces:
            measure_on_worker(config, context, store, _TRACED, warmup_steps=2 + TRACED_STEPS, on_step=traces.step)
    # A single worker does not communicate.
    shares: dict[str, Any] = {name: share for name, share in measurement.shares.items() if name != "communication"}
    facts = Facts(
        shares | {"memory": measurement.memory_share if on_cuda else None},
        precision=config.training.precision,
        gradient_checkpointing=bool(config.model.backbone.gradient_checkpointing),
        compile=config.training.compile,
        workers=1,
        stage=config.deepspeed.stage,
    )
    return {
        "task": config.model.task,
        "model": config.model.backbone.source,
        "device": torch.cuda.get_device_name(device) if on_cuda else str(device),
        "precision": config.training.precision,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "tokens_of_a_batch": config.batch.tokens,
        "tokens_per_s": measurement.tokens_per_s,
        "peak_memory_bytes": measurement.peak_memory_bytes,
        "stages": {name: {"share": share} for name, share in shares.items()},
        "operators": operators(traces, on_cuda),
        "advice": [str(advice) for advice in advise(facts)],
    }
