"""Folder of a fitted network that finds relatives, which ``embed run`` takes as a model."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from esmeray.common.errors import parsing
from esmeray.common.publishing import verified
from esmeray.dataset.embeddings.manifest import TRAINING_FILE
from esmeray.model.backbones.base import empty_weights
from esmeray.model.backbones.gapped_kmers import KmerBackbone
from esmeray.model.export.exported_folder import REMEDY, exported_folder
from esmeray.model.heads.relatives import RelativesHead

TASK = "relatives"
"""Task in the folder's manifest, and name of the head."""
_FILE = "relatives.safetensors"
_TABLE = "table"


def write_relatives(
    table: Tensor, head: RelativesHead, hashes_L: NDArray[np.uint64], folder: Path, overwrite: bool
) -> None:
    """Write the folder. ``table``: table of :class:`KmerBackbone`; ``hashes_L``: XXH3-64 of the training sequences.

    Raises the same errors as :func:`exported_folder`.
    """
    with exported_folder(folder, TASK, overwrite, None) as (building, _):
        # fp16 halves the file; its rounding is much smaller than the uncertainty of k-mer vectors.
        state = {name: tensor.half().contiguous() for name, tensor in (*head.state_dict().items(), (_TABLE, table))}
        save_file(state, building / _FILE)
        np.save(building / TRAINING_FILE, hashes_L)


def load_relatives(folder: Path) -> tuple[KmerBackbone, RelativesHead]:
    """Load the model of a folder, in fp32 on the CPU. Raises DataError if its file is damaged."""
    with parsing(folder / _FILE, REMEDY, SafetensorError):
        state = {name: tensor.float() for name, tensor in load_file(verified(folder / _FILE)).items()}
        table = state.pop(_TABLE)
        head = RelativesHead(*(state[name] for name in ("mean", "learnt", "coefficients")))
    with empty_weights():  # initializing a table takes longer than reading one
        backbone = KmerBackbone(table.shape[1])
    backbone.model.table.load_state_dict({"weight": table}, assign=True)
    return backbone, head
