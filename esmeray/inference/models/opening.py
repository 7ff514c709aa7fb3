"""Open a model by name on a device."""

import logging
from collections.abc import Collection
from pathlib import Path

import torch

from esmeray.common.errors import ConfigError
from esmeray.inference.models.kinds import prediction_of
from esmeray.inference.models.model import Model
from esmeray.inference.models.source import ModelSource, check_model, config_of, limit_of
from esmeray.model.backbones.source import weights_folder
from esmeray.model.backbones.stored_weights import num_parameters
from esmeray.model.device import DTYPES, check_device, choose_device, refuse_forked
from esmeray.model.section import BackboneSection
from esmeray.monitoring.sampling.host import memory_of_this_machine
from esmeray.tasks.opening import can_be_streamed, open_exported, open_network
from esmeray.train_config.section import LargeModelSection, Precision, Stream, Weights

log = logging.getLogger(__name__)


def open_model(
    source: str | Path | ModelSource,
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
    """Open the model that ``source`` names, for inference.

    Args:
        source: a run, an export, or a folder, hub name or size of transformers; or a model that is located already.
        precision: precision of weights and computation.
        device: cpu, cuda, cuda:1 ...; by default CUDA if available.
        heads: tasks whose heads are loaded; None for all that the model has.
        random_weights: accept a model size, which gets random weights, for trying things out.
        equal_bytes: on the CPU, make a vector independent of its batch, to the last bit. A few tokens then take as long
            as 2,048.
        stream: read the layers of an ESM-2 again for every 16,384 tokens, instead of keeping them in memory; "auto"
            streams if memory is too small. The results are the same.
        weights: weights of the layers of an ESM-2. "int8" rounds them to 8 bits, with half the memory and bytes of
            bf16. This is a different model: its vectors are not mixed with the stored weights' vectors.
        key: name of the setting, for messages.

    Raises ConfigError for a missing model or device, DataError for damaged files, ResourceError if the hub can't be
    reached. Raises ForkedError, a ConfigError, in a process that was forked after a model was opened.

    >>> model = esmeray.open_model("esm2_t6_8M", device="cpu", random_weights=True)
    >>> model.embed(["MKTAYIAKQR", "MSILVTRPSP"]).shape
    (2, 320)
    """
    section = LargeModelSection.of(precision=precision, stream=stream, weights=weights)
    precision = section.precision or "fp32"
    if device is not None:  # first, so that a wrong name is reported before gigabytes are read
        check_device(device)
    located = source if isinstance(source, ModelSource) else check_model(source, random_weights, key)
    refuse_forked(located.name)
    target = choose_device() if device is None else torch.device(device)
    streamed = _is_streamed(located, section.stream, weights, precision, target, key)
    if located.task is None:
        with_head = heads is None or "masked_lm" in heads
        opened = open_network(located.path, with_head=with_head, stream=streamed, weights=weights)
    else:
        opened = open_exported(located.task, located.folder, stream=streamed, weights=weights)
    config = config_of(located.folder) if prediction_of(located.task) else None
    return Model(
        # Unused heads cost memory, and their weights would change the fingerprint.
        opened._replace(heads={name: head for name, head in opened.heads.items() if heads is None or name in heads}),
        name=located.name,
        task=located.task,
        precision=precision,
        device=target,
        random_weights=located.random_weights,
        # A model trained with a crop predicts from texts cropped the same way. Embedding jobs have their own limit.
        equal_bytes=equal_bytes,
        limit=limit_of(config.data) if config else None,
        # Only a model trained to predict may have been trained on texts.
        content=config.model.tokenizer.content if config else "protein",
    )


def _is_streamed(
    located: ModelSource, stream: Stream, weights: Weights, precision: Precision, device: torch.device, key: str
) -> bool:
    """Return true if layers are read on demand.

    Raises ConfigError if the settings require streaming or 8-bit weights and the model doesn't support them.
    """
    if not can_be_streamed(located.task, located.path):
        setting = "stream true" if stream is True else f"weights {weights}"
        if stream is True or weights == "int8":
            raise ConfigError(
                f"{key}: {setting} supports only ESM-2 checkpoints in Hugging Face format, and "
                f"{located.path} is not one; remove the setting"
            )
        return False
    if stream != "auto":
        return stream
    parameters = num_parameters(weights_folder(BackboneSection(source=located.path)))
    # Weights are loaded in fp32 and cast on the device; 8-bit weights stay as they are.
    fits = (4 if weights == "stored" else 1) * parameters <= memory_of_this_machine().available
    if device.type == "cuda":
        itemsize = DTYPES[precision].itemsize if weights == "stored" else 1
        fits = fits and itemsize * parameters <= torch.cuda.mem_get_info(device)[0]
    if not fits:
        log.info(
            "%s: layers are streamed, because its %.3g parameters do not fit into memory", located.path, parameters
        )
    return not fits
