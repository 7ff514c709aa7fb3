"""Training of an experiment, from its settings to a finished run: ``esmeray train`` and ``esmeray.train``."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from esmeray.common.command_line import next_command, say
from esmeray.common.errors import ConfigError, EsmerayError
from esmeray.dataset.store.conversion import SAMPLE
from esmeray.run_folder.mirror import RunMirror
from esmeray.run_folder.paths import RunFolder
from esmeray.tasks.registry import part_named, task_named
from esmeray.train_config.section import Overrides, overrides_of
from esmeray.training.config import Config, load_config


def train(config: str | Path, settings: Mapping[str, Any] | None = None) -> Path:
    """Train an experiment on an available Ray cluster, or on a local one, like ``esmeray train``.

    Returns the folder of the run. The same call resumes an interrupted run.

    Args:
        config: YAML file, or the name of an included one: esm2ae, masked_lm, protein_classifier ...
        settings: values that override the file, by the names of docs/config.md.

    Raises EsmerayError, with a line per problem, if the run can't start or does not finish.

    >>> run = esmeray.train("masked_lm", {"run.name": "first", "training.max_steps": 2, **small})
    run first: ...
    >>> (run / "export" / "model.safetensors").exists()
    True
    """
    if not (isinstance(config, str | Path) and isinstance(settings, Mapping | None)):
        raise ConfigError(
            "train: expected the name or path of a settings file, and a dictionary of settings that override it"
        )
    code, run = trained(config, overrides_of(settings))
    if code:
        error = EsmerayError(f"{run.path}: training failed (exit code {code}); see its last lines")
        error.exit_code = code
        raise error
    return run.path


def trained(file: str | Path, overrides: Overrides) -> tuple[int, RunFolder]:
    """Train, run the task's inference after training, and print the next commands.

    Returns the exit code and the run.
    """
    from esmeray.training.launch.driver import train

    config = load_config(file, overrides)
    config.storage.apply()  # before any URI is read
    run = RunFolder(config.run.storage_path, config.run.name)
    task = task_named(config.model.task)
    # Preparation by the task, such as vectors of proteins, which training reads from disk.
    if task.before is not None:
        section = part_named(task.before)(config.run, config.data, getattr(config.model, config.model.task))
        config = config.model_copy(update={"model": config.model.model_copy(update={config.model.task: section})})
    code = train(config, predicting_structures)
    if code == 0:
        # Created before the task's work, because it uploads files that are newer than itself.
        mirror = RunMirror(run)
        if task.after is not None:
            part_named(task.after)(config.run, config.data, getattr(config.model, config.model.task))
        mirror.save_files()
        say("\n".join(_next_commands(task.next, run, config.data.source)))
    return code, run


def _next_commands(commands: tuple[str, ...], run: RunFolder, source: list[str]) -> Iterator[str]:
    """Yield the task's commands with the names of this run.

    Commands can't read the embedded sample, so ``new.fasta`` stands for its file.
    """
    values = {"{run}": [str(run.uri or run.path)], "{input}": ["new.fasta"] if source == [SAMPLE] else source}
    for command in commands:
        words = command.replace("{name}", run.path.name).split()
        yield next_command(*chain.from_iterable(values.get(word, [word]) for word in words))


@contextmanager
def predicting_structures(config: Config, store: Path) -> Iterator[Config]:
    """Run the predictor of structures during the block, if the data settings ask for one.

    Yields the config for the workers, which names the folder of predictions.
    """
    if config.data.predictions.model is None:
        yield config
        return
    from esmeray.inference.folding.job import predicting, sequences_in_order

    wanted = partial(
        sequences_in_order, store, config.data, config.model.diffusion, config.batch, config.training, config.run.seed
    )
    with predicting(config.data.predictions, config.ray, wanted) as folder:
        predictions = config.data.predictions.model_copy(update={"folder": str(folder)})
        yield config.model_copy(update={"data": config.data.model_copy(update={"predictions": predictions})})
