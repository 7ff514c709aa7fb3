"""Predictors of structures, by name: sequences in, backbone atoms with a confidence out.

A predictor is a class with ``fingerprint`` and ``predict`` under :func:`register`; tests and users add their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from common.errors import ConfigError
from dataset.structures.predictions import Predicted
from model.backbones.fingerprint import weights_fingerprint
from model.backbones.loading import quiet_transformers


class Predictor(Protocol):
    """A model of structures on a device."""

    fingerprint: str
    """Identity of weights, architecture and version: predictions of another one are never mixed with its own."""

    def __init__(self, source: str, device: str) -> None:
        """Load from a local folder or hub name."""

    def predict(self, sequences: Sequence[str]) -> list[Predicted]:
        """Structures of a batch."""


Kind = TypeVar("Kind", bound=type)
PREDICTORS: dict[str, type[Predictor]] = {}


def register(name: str) -> Callable[[Kind], Kind]:
    """Make a class known under this name."""

    def add(kind: Kind) -> Kind:
        PREDICTORS[name] = kind
        return kind

    return add


def predictor(name: str, source: str, device: str) -> Predictor:
    """Load a predictor. Raises ConfigError where there is none of this name, or its source can't be loaded."""
    if name not in PREDICTORS:
        raise ConfigError(f"--predictor {name}: there are {', '.join(sorted(PREDICTORS))}")
    try:
        return PREDICTORS[name](source, device)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"--model {source}: can't be loaded as {name} ({reason})") from error


@register("esmfold")
class EsmFold:
    """ESMFold (Lin et al. 2023) by transformers' EsmForProteinFolding."""

    def __init__(self, source: str, device: str) -> None:
        from transformers import EsmForProteinFolding

        with quiet_transformers():
            self._model = EsmForProteinFolding.from_pretrained(source, use_safetensors=True).eval().to(device)
        if device == "cpu":
            self._model.esm.float()
        self.fingerprint = f"esmfold-{weights_fingerprint(self._model)}"

    @torch.inference_mode()
    def predict(self, sequences: Sequence[str]) -> list[Predicted]:
        found = self._model.infer(list(sequences))
        atoms = found["positions"][-1, :, :, :4].float().cpu().numpy()  # of atom14: N, CA, C, O first
        confidence = 100 * found["plddt"][..., 1].float().cpu().numpy()  # of CA
        lengths = list(map(len, sequences))
        return [Predicted(atoms[number, :length], confidence[number, :length]) for number, length in enumerate(lengths)]
