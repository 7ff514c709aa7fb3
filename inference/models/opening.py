"""From the name of a model to a model on a device: the one way in."""

from collections.abc import Collection
from pathlib import Path

import torch

from esmeray.inference.models.kinds import prediction_of
from esmeray.inference.models.model import Model
from esmeray.inference.models.source import check_model, config_of, limit_of, naming
from esmeray.model.device import check_device, choose_device
from esmeray.tasks.opening import open_exported, open_network
from esmeray.train_config.section import Precision


def open_model(
    source: str | Path,
    precision: Precision = "fp32",
    device: torch.device | str | None = None,
    *,
    heads: Collection[str] | None = None,
    random_weights: bool = False,
    equal_bytes: bool = True,
    key: str = "model",
) -> Model:
    """The model that ``source`` names, for inference alone.

    Args:
        source: a run, an export, or a folder, hub name or size of transformers.
        precision: of weights and computation.
        device: cpu, cuda, cuda:1 ...; by default CUDA where there is one.
        heads: names of the tasks whose heads are wanted; None for all that the model has.
        random_weights: take a size, whose weights are random, to try things out.
        equal_bytes: on the CPU, make a vector of its sequence alone, to the last bit, whatever shares its batch. Few
            tokens then take as long as 2,048.
        key: name of the setting, for messages.

    Raises ConfigError for what is not there, DataError for damaged files, ResourceError where the hub can't be reached.

    >>> model = esmeray.open_model("esm2_t6_8M", device="cpu", random_weights=True)
    >>> model.embed(["MKTAYIAKQR", "MSILVTRPSP"]).shape
    (2, 320)
    """
    if device is not None:  # first: a wrong name is reported before gigabytes are read
        check_device(device)
    located = check_model(source, random_weights, key)
    with naming(key):
        if located.task is not None:
            opened = open_exported(located.task, located.folder)
        else:
            opened = open_network(located.path, with_head=heads is None or "masked_lm" in heads)
    return Model(
        # Heads that nobody asked for cost memory, and their weights would be part of the fingerprint.
        opened._replace(heads={name: head for name, head in opened.heads.items() if heads is None or name in heads}),
        name=str(source),
        task=located.task,
        precision=precision,
        device=choose_device() if device is None else torch.device(device),
        random_weights=located.random_weights,
        # Trained with a crop, a model predicts of texts that are cropped alike. Embeddings have the job's own limit.
        equal_bytes=equal_bytes,
        limit=limit_of(config_of(located.folder).data) if prediction_of(located.task) else None,
    )
