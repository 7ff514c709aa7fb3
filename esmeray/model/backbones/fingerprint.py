"""Fingerprint of a frozen backbone's features: equal if the same features are computed."""

import hashlib
import json
from typing import Any

import torch
import xxhash
from torch import nn

from esmeray.common.errors import DataError
from esmeray.model.backbones.base import PackedBackbone
from esmeray.model.backbones.stored_weights import REMEDY
from esmeray.model.backbones.streaming import state_of

_ORIGIN = ("_name_or_path", "transformers_version", "architectures", "dtype")


def weights_fingerprint(module: nn.Module, owner: str | None = None) -> str:
    """Return the XXH3-128 of all names, parameters and buffers in hex, on any device.

    Raises DataError if ``owner`` (a name) is given and a value is not finite.
    """
    digest = xxhash.xxh3_128()
    for name, tensor in state_of(module):
        if owner is not None and not bool(tensor.isfinite().all()):
            raise DataError(f"{owner}: the weights {name} contain NaN or infinity; {REMEDY}")
        digest.update(name.encode())
        # Viewed as bytes, since NumPy has no bfloat16.
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def architecture(backbone: PackedBackbone) -> dict[str, Any]:
    """Return the config of a backbone without its origin."""
    return {name: value for name, value in backbone.config.to_dict().items() if name not in _ORIGIN}


def features_fingerprint(
    backbone: PackedBackbone,
    weights: str,
    tokenizer: str,
    max_length: int | None,
    crop: str,
    precision: str,
    pooling: str,
) -> str:
    """Return the fingerprint of features: weights, tokenizer, architecture, cropping, precision and pooling."""
    # Everything that changes a feature by more than rounding; device and batch composition do not.
    described = {
        "weights": weights,
        "config": architecture(backbone),
        "tokenizer": tokenizer,
        "crop": [max_length, crop],
        "dtype": precision,
        "pooling": pooling,
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()
