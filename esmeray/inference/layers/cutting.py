"""Write a model without the layers after one of them, as a Hugging Face folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from esmeray.common.errors import ConfigError
from esmeray.inference.models.model import Model
from esmeray.inference.models.opening import open_model
from esmeray.inference.models.source import ModelSource
from esmeray.model.backbones.base import layer_list
from esmeray.model.backbones.loading import residue_tokenizer
from esmeray.model.backbones.lora import merge
from esmeray.model.section import BackboneSection
from esmeray.tasks.opening import open_exported, open_network

_CARD = """# {name}, cut after layer {layer} of {layers}

`esmeray embed layers` made this folder. Its vectors equal those of `esmeray embed run --embed.models {name}
--embed.layers {layer}`: without the norm that the whole model has after its last layer. transformers returns them as
`hidden_states[-1]` with `output_hidden_states=True`; `last_hidden_state` is normalized.
"""


def write_cut(model: Model, source: ModelSource, layer: int, folder: Path, texts: Sequence[str]) -> None:
    """Write the model's layers up to this one and its tokenizer, without heads of a language model or task.

    ``model``: the opened source. ``texts``: sequences whose vectors are compared with the written model's. Raises
    ConfigError if there is no layer, or the architecture can't be cut.
    """
    if layer == 0:
        raise ConfigError(
            "layers.output: layer 0, the embeddings, was chosen, which is no model; use --embed.layers 0 instead"
        )
    # Imported here: importing transformers' models takes seconds, and ESM-2 does not need them otherwise.
    from esmeray.model.backbones.huggingface_loading import save_network, transformers_network

    if source.task is None:
        opened = open_network(source.path, with_head=False)
    else:
        opened = open_exported(source.task, source.folder)
    merge(opened.backbone)
    layers = opened.backbone.num_layers
    network: Any = transformers_network(opened.backbone.model)
    state = network.state_dict()
    if layer < layers:
        del layer_list(network, layers)[1][layer:]
        config = network.config
        config.num_hidden_layers = layer
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layer]
        # The last of transformers' hidden_states is then the layer's own output, as it is in the whole model.
        config.tie_last_hidden_states = False
        # Without the heads that read the last layer, or the attention of all layers.
        heads = ("contact_head.", "pooler.")
        state = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith(heads)}
    save_network(network, folder, state)
    # A backbone that maps the ESM alphabet to its own ids is saved with the tokenizer of these ids.
    is_mapped = opened.backbone.residue_ids is not None
    tokenizer = residue_tokenizer(BackboneSection(source=str(source.folder))) if is_mapped else opened.tokenizer
    tokenizer.save(folder)
    card = _CARD.format(name=source.name, layer=layer, layers=layers)
    (folder / "README.md").write_text(card, encoding="utf-8")
    cut = open_model(folder, model.facts.precision, model.device, heads=[])
    texts = [text[: model.facts.longest] for text in texts]
    if not np.array_equal(cut.embed(texts), model.embed(texts, layer=layer)):
        kind = network.config.model_type
        raise ConfigError(
            f"layers.output: a {kind} can't be cut to the same vectors; use --embed.layers {layer} instead"
        )
