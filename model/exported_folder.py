"""The folder of an exported model: whole under its final name, or not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from dataset.publishing import exclusive, published
from train_config.errors import ConfigError, ResourceError


@contextmanager
def exported_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """A folder to write to, which gets its name when the block ends and is removed when it raises.

    Args:
        target: final name, absolute; its parent is made if need be.
        overwrite: replace a folder of that name.

    Raises:
        ConfigError: the folder exists and ``overwrite`` is not set.
        ResourceError: the disk is full or not writable; nothing is left behind.
    """
    if target.exists() and not overwrite:
        raise ConfigError(f"{target} exists; choose another folder for the export or remove it")
    with exclusive(target), published(target) as building:
        try:
            yield building
        except SafetensorError as error:
            raise ResourceError(
                f"the model can't be exported to {target} ({error}); free space or choose another folder"
            ) from error
