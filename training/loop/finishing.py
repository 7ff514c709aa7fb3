"""The end of a run: the last checkpoint, the exported model, the outcome, and failures that would repeat."""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from esmeray.common.errors import DivergenceError, EsmerayError, ResourceError
from esmeray.common.publishing import is_disk_full
from esmeray.model.device import is_out_of_memory
from esmeray.run_folder.checkpoints import CheckpointFolder, Position
from esmeray.run_folder.metrics_log import read_metrics
from esmeray.run_folder.mirror import ENDING_S
from esmeray.run_folder.paths import Outcome, RunFolder, no_space
from esmeray.tasks.experiment import TrainedState, experiment_class
from esmeray.train_config.loading import dump_config
from esmeray.training.config import Config
from esmeray.training.engine.memory_guard import REMEDY
from esmeray.training.loop.building import Worker

_LOST_PEER = re.compile(r"gloo|nccl|connection (closed|reset|refused)|timed? ?out|broken pipe|store", re.IGNORECASE)


def finish(worker: Worker, outcome: Outcome) -> Outcome:
    """Wait for the last checkpoint, export the model, record the outcome."""
    worker.watchdog.extend()
    if outcome.status == "failed":
        worker.writer.give_up()  # what failed may be the disk: nobody waits for it
    else:
        worker.writer.wait()
    if outcome.status == "finished":
        step = _load_best(worker) if worker.experiment.exports_best else outcome.step
        # Every worker: under ZeRO each has a part of it, and gathering them is collective.
        state = worker.engine.full_precision_state()
        if worker.context.rank == 0:
            export_state(state, worker.checkpoints.folder(step), worker.run, worker.run.export)
    worker.control.all_true(True)  # every shard is on disk, or given up
    if worker.context.rank == 0 and outcome.status == "failed":
        worker.checkpoints.sweep()  # of a run that ends here no half-written checkpoint is left
    # The worker that failed has written why; rank 0 knows only that another did.
    if worker.context.rank == 0 and worker.run.read_outcome() is None:
        worker.log.event(outcome.status, max(outcome.step, 0), message=outcome.message)
        worker.run.write_outcome(outcome)
    worker.leave(is_over=True)
    worker.mirror.wait(ENDING_S if outcome.status == "failed" else None)
    worker.log.close()
    worker.experiment.close()
    worker.engine.close()
    return outcome


def export_state(
    state: Mapping[str, Tensor], checkpoint: CheckpointFolder, run: RunFolder, folder: Path, overwrite: bool = True
) -> Path:
    """Write a Hugging Face folder of a model in which ``state`` was trained; the rest comes from its source.

    Config, tokenizer and label names are the checkpoint's: those in the run's folder may be of later data. Raises
    ConfigError where the folder may not be overwritten, CheckpointError where the checkpoint is damaged or the state
    does not fit its config's model.
    """
    config, step = checkpoint.settings(Config), checkpoint.step
    data = ", ".join(Path(source).name or source for source in config.data.source)
    metrics = _validation_before(run.metrics, step)
    facts = {"run": config.run.name, "data": data, "steps": step, "metrics": metrics}
    trained = TrainedState(state, checkpoint, run, config.model, config.run.seed, dump_config(config), facts)
    return experiment_class(config.model).export(trained, folder, overwrite=overwrite)


def _load_best(worker: Worker) -> int:
    """Load the best checkpoint; returns its step."""
    # Rank 0 chooses: listings of a shared file system may differ between nodes for a while.
    folder = worker.checkpoints.best() if worker.context.rank == 0 else None
    name = worker.control.from_rank_0("" if folder is None else folder.path.name)
    chosen = CheckpointFolder(worker.checkpoints.root / name)
    worker.mirror.wait()
    worker.control.all_true(True)  # the URI has the parts of all
    worker.engine.load_shards(worker.mirror.fetched(chosen))
    worker.log.event("exports_best", chosen.step, checkpoint=name)
    return chosen.step


def _validation_before(metrics: Path, step: int) -> dict[str, float]:
    if not metrics.exists():
        return {}
    records = [r for r in read_metrics(metrics) if r["kind"] == "validation" and r["step"] <= step]
    hidden = {"kind", "step", "epoch", "time"}
    return {name: value for name, value in records[-1].items() if name not in hidden} if records else {}


def repeatable(error: Exception) -> int | None:
    """The exit code of a failure that trying again would repeat; None for what a machine did.

    A lost peer shows as a RuntimeError of the collective or an error of Ray's, a failing disk or network as OSError:
    those are worth another try. So is an EsmerayError that says so. Everything else would only happen again.
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
    if is_disk_full(error):
        return no_space(getattr(error, "filename", None) or "a file of the run")
    return f"{type(error).__name__}: {error}"


def failed(run: RunFolder, position: Position, error: EsmerayError | None) -> Outcome:
    """The outcome where a worker can't continue, written by the one whose ``error`` it is."""
    message = str(error) if error else "another worker failed"
    outcome = Outcome("failed", position.step, message, error.exit_code if error else 1)
    if error is not None:
        run.write_outcome(outcome)
    return outcome


def diverged(run: RunFolder, position: Position) -> Outcome:
    """The outcome after too many steps in a row that were not finite."""
    message = (
        f"loss or gradient was not finite in {position.nonfinite_in_a_row} steps in a row, up to step "
        f"{position.step}; the records are named in {run.nonfinite}: lower training.learning_rate, or look at them"
    )
    return Outcome("diverged", position.step, message, DivergenceError.exit_code)
