"""Export a run's checkpoint as a Hugging Face folder: safetensors, tokenizer, model card, resolved config.

Works on a run that is finished, stopped or still training. The checkpoint is verified first.

Example:
  esmeray train export runs/esm2ae --export.checkpoint best --export.output my-autoencoder
"""

import os
from typing import Literal

from esmeray.common.errors import CheckpointError, ConfigError, expanded
from esmeray.common.publishing import refuse_existing
from esmeray.model.export.exported_folder import MADE_BY
from esmeray.run_folder.checkpoints import CheckpointFolder, CheckpointStore
from esmeray.run_folder.paths import RunFolder
from esmeray.tools.grammar import Overwrite, RunPath, command
from esmeray.train_config.section import Section


class ExportSection(Section):
    """Checkpoint to export, and output folder."""

    checkpoint: str = "latest"
    """Checkpoint to export: latest; best (lowest validation loss); or a name such as step-00000100."""
    weights: Literal["last", "mean"] = "last"
    """Weights to export. last: weights at the checkpoint's step; mean: their exponential moving average, for a run with
    training.weight_mean."""
    output: str | None = None
    """Folder to write. Default: export-CHECKPOINT in the run's folder."""


@command("train export", __doc__)
def main(run: RunPath, export: ExportSection, overwrite: Overwrite = False) -> None:
    source = RunFolder(run.parent, run.name)
    if not source.config.exists():
        raise ConfigError(f"{source.path}: not a run folder (no config.yaml); give a folder such as runs/NAME")
    # Check the checkpoint and the output before DeepSpeed is loaded.
    folder = _chosen(CheckpointStore(source.checkpoints), export.checkpoint)
    output = expanded(export.output or source.path / f"export-{folder.path.name}")
    refuse_existing(output, MADE_BY, overwrite)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed (0.19.8) warns that it found no accelerator
    from esmeray.training.checkpoints.consolidation import FP32, full_precision_state
    from esmeray.training.engine.zero import WEIGHT_MEAN
    from esmeray.training.loop.finishing import export_state

    state = full_precision_state(folder, WEIGHT_MEAN if export.weights == "mean" else FP32)
    print(export_state(state, folder, source, output, overwrite))


def _chosen(store: CheckpointStore, name: str) -> CheckpointFolder:
    """Checkpoint chosen by ``latest``, ``best`` or a folder's name."""
    folders = store.complete()
    if not folders:
        raise CheckpointError(f"{store.root}: the run has no complete checkpoint yet")
    # Folder names override latest and best, so that every checkpoint can be chosen.
    chosen = {"latest": folders[0], "best": store.best()} | {folder.path.name: folder for folder in folders}
    if (folder := chosen.get(name)) is None:
        names = ", ".join(folder.path.name for folder in folders)
        raise CheckpointError(f"{store.root}: no checkpoint {name}; available: {names}")
    return folder
