"""Open any model that designs sequences, on its device."""

from pathlib import Path
from typing import Any

import torch

from esmeray.inference.design.autoregression import AutoregressiveDesigner
from esmeray.inference.design.denoising import Denoiser
from esmeray.inference.design.sampling import Designer
from esmeray.inference.models.opening import open_model
from esmeray.model.device import check_device, choose_device
from esmeray.model.export import proteinmpnn_weights
from esmeray.model.export.exported_folder import task_of


def open_designer(path: Path, device: str | None) -> Designer:
    """Open an exported model, or a .pt file of ProteinMPNN. Raises ConfigError for an unavailable device."""
    if path.is_dir() and task_of(path) != proteinmpnn_weights.TASK:
        model: Any = open_model(path, device=device, heads=["diffusion"]).heads["diffusion"]
        return Denoiser(model)
    if device is not None:
        check_device(device)
    network, settings = proteinmpnn_weights.open_proteinmpnn(path)
    target = choose_device() if device is None else torch.device(device)
    return AutoregressiveDesigner(network.to(target), settings.title)
