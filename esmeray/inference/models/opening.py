"""From the name of a model to a model on a device: the one way in."""

import logging
from collections.abc import Collection
from pathlib import Path

import torch

from esmeray.common.errors import ConfigError
from esmeray.inference.models.kinds import prediction_of
from esmeray.inference.models.model import Model
from esmeray.inference.models.source import ModelSource, check_model, config_of, limit_of, naming
from esmeray.model.backbones.source import SOURCE_KEY, weights_folder
from esmeray.model.backbones.stored_weights import num_parameters
from esmeray.model.device import DTYPES, check_device, choose_device, refuse_forked
from esmeray.model.section import BackboneSection
from esmeray.monitoring.sampling.host import memory_of_this_machine
from esmeray.tasks.opening import can_be_streamed, open_exported, open_network
from esmeray.train_config.section import ComputeSection, Precision, Stream, Weights

log = logging.getLogger(__name__)


def open_model(
    source: str | Path,
    precision: Precision = "fp32",
    device: torch.device | str | None = None,
    *,
    heads: Collection[str] | None = None,
    random_weights: bool = False,
    equal_bytes: bool = True,
    stream: Stream = "auto",
    weights: Weights = "stored",
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
        stream: read the layers of an ESM-2 again for every 16,384 tokens, in place of holding them in memory; "auto"
            where memory does not suffice. The results are the same.
        weights: of the layers of an ESM-2; "int8" rounds them to 8 bits, in half the memory and the bytes of bf16. The
            model is another one then, whose vectors are not mixed with those of the stored weights.
        key: name of the setting, for messages.

    Raises ConfigError for what is not there, DataError for damaged files, ResourceError where the hub can't be reached,
    ForkedError, a ConfigError, in a process that was forked after a model was opened.

    >>> model = esmeray.open_model("esm2_t6_8M", device="cpu", random_weights=True)
    >>> model.embed(["MKTAYIAKQR", "MSILVTRPSP"]).shape
    (2, 320)
    """
    refuse_forked(str(source))
    section = ComputeSection.of(precision=precision, stream=stream, weights=weights)
    precision = section.precision or "fp32"
    if device is not None:  # first: a wrong name is reported before gigabytes are read
        check_device(device)
    located = check_model(source, random_weights, key)
    target = choose_device() if device is None else torch.device(device)
    with naming(key):
        streamed = _is_streamed(located, section.stream, weights, precision, target)
        with_head = heads is None or "masked_lm" in heads
        opened = (
            open_network(located.path, with_head=with_head, stream=streamed, weights=weights)
            if located.task is None
            else open_exported(located.task, located.folder, stream=streamed, weights=weights)
        )
    config = config_of(located.folder) if prediction_of(located.task) else None
    return Model(
        # Heads that nobody asked for cost memory, and their weights would be part of the fingerprint.
        opened._replace(heads={name: head for name, head in opened.heads.items() if heads is None or name in heads}),
        name=str(source),
        task=located.task,
        precision=precision,
        device=target,
        random_weights=located.random_weights,
        # Trained with a crop, a model predicts of texts that are cropped alike. Embeddings have the job's own limit.
        equal_bytes=equal_bytes,
        limit=limit_of(config.data) if config else None,
        # Only what was trained to predict may have been trained on texts.
        content=config.model.tokenizer.content if config else "protein",
    )


def _is_streamed(
    located: ModelSource, stream: Stream, weights: Weights, precision: Precision, device: torch.device
) -> bool:
    """Decide whether layers are read as they are needed.

    Raises ConfigError where they should be, or be of 8 bits, and can't.
    """
    if not can_be_streamed(located.task, located.path):
        asked = "stream true" if stream is True else f"weights {weights}"
        if stream is True or weights == "int8":
            raise ConfigError(
                f"{SOURCE_KEY}: {asked} needs an ESM-2 in a folder or of the hub, as transformers has it, and "
                f"{located.path} is none; leave the setting out"
            )
        return False
    if stream != "auto":
        return stream
    parameters = num_parameters(weights_folder(BackboneSection(source=located.path)))
    # Weights are loaded in fp32, and cast on the device; those of 8 bits stay so.
    fits = (4 if weights == "stored" else 1) * parameters <= memory_of_this_machine().available
    if device.type == "cuda":
        itemsize = DTYPES[precision].itemsize if weights == "stored" else 1
        fits = fits and itemsize * parameters <= torch.cuda.mem_get_info(device)[0]
    if not fits:
        log.info("%s: layers are streamed, as memory does not hold its %.3g parameters", located.path, parameters)
    return not fits
