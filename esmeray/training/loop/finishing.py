"""The end of a run: last checkpoint, exported model, outcome, and which failures are worth a retry."""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from esmeray.common.errors import DivergenceError, EsmerayError, ResourceError
from esmeray.common.publishing import is_disk_full
from esmeray.model.backbones.source import has_random_weights
from esmeray.model.device import is_out_of_memory
from esmeray.run_folder.checkpoints import CheckpointFolder, Position
from esmeray.run_folder.metrics_log import read_metrics
from esmeray.run_folder.mirror import ENDING_S
from esmeray.run_folder.paths import Outcome, RunFolder, Status, no_space
from esmeray.tasks.experiment import TrainedState, experiment_class
from esmeray.train_config.loading import dump_config
from esmeray.training.config import Config
from esmeray.training.engine.memory_guard import REMEDY
from esmeray.training.loop.building import Worker
from esmeray.training.loop.checkpoints import Checkpoints

_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed? ?out|broken pipe|store", re.IGNORECASE)


def finish(worker: Worker, outcome: Outcome) -> Outcome:
    """Wait for the last checkpoint, export the model, record the outcome and stop the background work."""
    worker.observers.watchdog.extend()
    if outcome.status == "failed":
        worker.checkpoints.writer.give_up()  # the disk may be the cause of the failure: do not wait for it
    else:
        worker.checkpoints.writer.wait()
    if outcome.status == "finished":
        step = _load_best(worker.checkpoints) if worker.experiment.exports_best else outcome.step
        # Every worker calls it: under ZeRO each has a part of the weights, and gathering them is collective.
        state = worker.engine.full_precision_state()
        if worker.control.rank == 0:
            export_state(state, worker.checkpoints.store.folder(step), worker.run, worker.run.export)
    worker.control.all_true(True)  # every shard is on disk, or its writing was given up
    if worker.control.rank == 0 and outcome.status == "failed":
        worker.checkpoints.store.sweep()  # leave no half-written checkpoint behind
    # The failed worker has written the cause; rank 0 only knows that another worker failed.
    if worker.control.rank == 0 and worker.run.read_outcome() is None:
        worker.observers.log.event(outcome.status, max(outcome.step, 0), message=outcome.message)
        worker.run.write_outcome(outcome)
    worker.observers.close()
    # After the outcome is written, since the URI gets it after the last checkpoint.
    worker.checkpoints.mirror.wait(ENDING_S if outcome.status == "failed" else None)
    worker.observers.log.close()
    worker.experiment.close()
    worker.engine.close()
    return outcome


def export_state(
    state: Mapping[str, Tensor], checkpoint: CheckpointFolder, run: RunFolder, folder: Path, overwrite: bool = True
) -> Path:
    """Write a Hugging Face folder of a model with the trained ``state``; the other weights come from its source.

    Config, tokenizer and label names are the checkpoint's, since those in the run's folder may belong to later data.
    Raises ConfigError if the folder must not be overwritten, and CheckpointError if the checkpoint is damaged or the
    state does not fit its config's model.
    """
    config, step = checkpoint.settings(Config), checkpoint.step
    backbone = config.model.backbone
    base = "none, random weights" if has_random_weights(backbone) else backbone.source
    labels = config.data.labels
    by_file = f"held out by {labels.split} ({labels.split_column or ', '.join(labels.validation_source)})"
    units = f"proteins, by clusters at identity {labels.identity:g}," if labels.split == "clusters" else ""
    by_share = f"{config.data.validation_share:g} of the {units or 'distinct sequences'} held out ({labels.split})"
    facts = {
        "run": config.run.name,
        "license": config.run.license,
        # A local path means nothing on another machine.
        "base_model": Path(base).name if Path(base).exists() else base,
        "data": ", ".join(Path(source).name or source for source in config.data.source),
        "split": by_file if labels.split in ("column", "files") else by_share,
        "steps": step,
        "metrics": _validation_before(run.metrics, step),
    }
    trained = TrainedState(state, checkpoint, run, config.model, config.run.seed, dump_config(config), facts)
    return experiment_class(config.model).export(trained, folder, overwrite=overwrite)


def _load_best(checkpoints: Checkpoints) -> int:
    """Load the best checkpoint and return its step."""
    control = checkpoints.control
    # Rank 0 chooses: listings of a shared file system may differ between nodes for a while.
    best = checkpoints.store.best() if control.rank == 0 else None
    chosen = checkpoints.store.folder(control.from_rank_0(0 if best is None else best.step))
    checkpoints.mirror.wait()
    control.all_true(True)  # the URI has the parts of all workers
    checkpoints.load(chosen)
    checkpoints.observers.log.event("exports_best", chosen.step, checkpoint=chosen.path.name)
    return chosen.step


def _validation_before(metrics: Path, step: int) -> dict[str, float]:
    if not metrics.exists():
        return {}
    records = [r for r in read_metrics(metrics) if r["kind"] == "validation" and r["step"] <= step]
    hidden = {"kind", "step", "epoch", "time"}
    return {name: value for name, value in records[-1].items() if name not in hidden} if records else {}


def repeatable(error: Exception) -> int | None:
    """Return the exit code of a failure that a retry would repeat, or None if a retry may succeed.

    A lost peer appears as a RuntimeError of a collective or as an error of Ray; a failing disk or network appears as an
    OSError. These are retried, and so is an EsmerayError marked as retryable. Every other error would recur.
    """
    if isinstance(error, EsmerayError):
        return None if error.retryable else error.exit_code
    if is_out_of_memory(error) or is_disk_full(error):
        return ResourceError.exit_code
    if isinstance(error, OSError):
        return EsmerayError.exit_code if isinstance(error, FileNotFoundError | PermissionError) else None
    lost_peer = isinstance(error, RuntimeError) and _LOST_PEER.search(str(error))
    from_launcher = type(error).__module__.partition(".")[0] == "ray"
    return None if lost_peer or from_launcher else EsmerayError.exit_code


def described(error: Exception) -> str:
    if isinstance(error, EsmerayError):
        return str(error)
    if is_out_of_memory(error):
        return f"out of memory: {REMEDY}"
    in_full = no_space(getattr(error, "filename", None) or "a file of the run")
    return in_full if is_disk_full(error) else f"{type(error).__name__}: {error}"


def failed(run: RunFolder, position: Position, error: EsmerayError | None) -> Outcome:
    """Return the outcome if a worker can't continue. The worker whose ``error`` it is writes it to disk."""
    message = str(error) if error else "another worker failed"
    outcome = Outcome("failed", position.step, message, error.exit_code if error else 1)
    if error is not None:
        run.write_outcome(outcome)
    return outcome


def stopped(checkpoints: Checkpoints, run: RunFolder, position: Position) -> Outcome:
    """Save the state, and return the outcome if the driver asked for the end of the run or of the attempt."""
    if position.step > checkpoints.saved_step:
        checkpoints.save(position, None)
    status: Status = "stopped" if run.stop_requested() else "resizing"
    return Outcome(status, position.step, f"{status} at step {position.step}; the same command resumes it", 0)


def diverged(run: RunFolder, position: Position) -> Outcome:
    """Return the outcome after too many consecutive steps that were not finite."""
    message = (
        f"loss or gradient was not finite in {position.nonfinite_in_a_row} steps in a row, up to step "
        f"{position.step}; {run.nonfinite} lists the records: check them, or lower training.learning_rate"
    )
    return Outcome("diverged", position.step, message, DivergenceError.exit_code)
