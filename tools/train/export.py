"""Export a run's checkpoint as a Hugging Face folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from common.arguments import parse
from common.errors import CheckpointError, ConfigError
from common.publishing import refuse_existing
from model.export.exported_folder import MADE_BY
from run_folder.paths import RunFolder
from training.checkpoints.checkpoint import CheckpointFolder, CheckpointStore


@dataclass(frozen=True)
class Export:
    """Export a run's checkpoint as a Hugging Face folder: safetensors, tokenizer, model card, resolved config.

    Works on a run that is finished, stopped or still training. The checkpoint is verified first.

    Example: esmeray train export runs/esm2ae --checkpoint best --output my-autoencoder
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    checkpoint: Literal["latest", "best"] | str = "latest"
    """latest; best: lowest validation loss; or a name such as step-00000100."""
    output: Path | None = None
    """Folder to write. Default: export-<checkpoint> in the run's folder."""
    overwrite: bool = False
    """Replace the folder if it is an export that nobody changed since."""


def main(argv: list[str]) -> int:
    """Verify, consolidate, export."""
    options = parse(Export, argv, "train export")
    run = RunFolder(options.run.parent, options.run.name)
    if not run.exists:
        raise ConfigError(f"{run.path}: no run there (it has no config.yaml)")
    folder = _chosen(CheckpointStore(run.checkpoints), options.checkpoint)
    output = (options.output or run.path / f"export-{folder.path.name}").expanduser()
    refuse_existing(output, MADE_BY, options.overwrite)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # without it DeepSpeed (0.19.8) warns that there is none
    from training.checkpoints.consolidation import full_precision_state
    from training.loop.finishing import export_state

    state = full_precision_state(folder)
    print(export_state(state, folder, run, output, options.overwrite))
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
