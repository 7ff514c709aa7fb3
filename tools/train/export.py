"""Export a run's checkpoint as a Hugging Face folder: safetensors, tokenizer, model card, resolved config.

Works on a run that is finished, stopped or still training. The checkpoint is verified first.

Example:
  esmeray train export runs/esm2ae --export.checkpoint best --export.output my-autoencoder
"""

import os
from pathlib import Path

from esmeray.common.errors import CheckpointError, ConfigError
from esmeray.common.publishing import refuse_existing
from esmeray.model.export.exported_folder import MADE_BY
from esmeray.run_folder.checkpoints import CheckpointFolder, CheckpointStore
from esmeray.run_folder.paths import RunFolder
from esmeray.tools.grammar import OnRun, parse
from esmeray.train_config.command_schema import ExportSection


def main(argv: list[str]) -> int:
    arguments, settings = parse(argv, "train export", __doc__, OnRun, ExportSection)
    run = RunFolder(arguments.run.parent, arguments.run.name)
    if not run.exists:
        raise ConfigError(f"{run.path}: no run there (it has no config.yaml); give its folder, as runs/NAME")
    folder = _chosen(CheckpointStore(run.checkpoints), settings.checkpoint)
    output = Path(settings.output or run.path / f"export-{folder.path.name}").expanduser()
    refuse_existing(output, MADE_BY, arguments.overwrite)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without it DeepSpeed (0.19.8) warns that there is none
    from esmeray.training.checkpoints.consolidation import FP32, full_precision_state
    from esmeray.training.engine.zero import WEIGHT_MEAN
    from esmeray.training.loop.finishing import export_state

    state = full_precision_state(folder, WEIGHT_MEAN if settings.weights == "mean" else FP32)
    print(export_state(state, folder, run, output, arguments.overwrite))
    return 0


def _chosen(store: CheckpointStore, name: str) -> CheckpointFolder:
    """Checkpoint named by ``latest``, ``best`` or a folder's name."""
    folders = store.complete()
    if not folders:
        raise CheckpointError(f"{store.root}: the run has no complete checkpoint yet")
    chosen = {"latest": folders[0], "best": store.best()} | {folder.path.name: folder for folder in folders}
    if (folder := chosen.get(name)) is None:
        names = ", ".join(folder.path.name for folder in folders)
        raise CheckpointError(f"{store.root}: no checkpoint {name}; there are {names}")
    return folder
