"""Write a model without the layers after one of them, as a Hugging Face folder."""

from pathlib import Path
from typing import Any

from esmeray.inference.models.source import ModelSource
from esmeray.model.backbones.base import layer_list
from esmeray.model.backbones.huggingface_loading import save_network, transformers_network
from esmeray.model.backbones.loading import residue_tokenizer
from esmeray.model.backbones.lora import merge
from esmeray.model.section import BackboneSection
from esmeray.tasks.opening import open_exported, open_network

_CARD = """# {name}, cut after layer {layer} of {layers}

Made by `esmeray embed layers`. The vectors equal what `embed run --embed.layers {layer}` computes with the whole model.
If the whole model has a norm after its last layer, they are without it: in transformers they are `hidden_states[-1]`
with `output_hidden_states=True`, and `last_hidden_state` is normalized.
"""


def write_cut(source: ModelSource, layer: int, folder: Path) -> None:
    """Write the layers up to this one and the tokenizer, without heads of a language model or task."""
    is_network = source.task is None
    opened = open_network(source.path, with_head=False) if is_network else open_exported(source.task, source.folder)
    backbone, tokenizer = opened.backbone, opened.tokenizer
    merge(backbone)
    network: Any = transformers_network(backbone.model)
    state, layers = network.state_dict(), backbone.num_layers
    if layer < layers:
        del layer_list(network, layers)[1][layer:]
        # Heads that read the last layer or the attention of all layers are left out.
        heads = ("contact_head.", "pooler.")
        state = {name: tensor for name, tensor in network.state_dict().items() if not name.startswith(heads)}
        network.config.num_hidden_layers = layer
        if getattr(network.config, "layer_types", None):
            network.config.layer_types = network.config.layer_types[:layer]
        # transformers' setting for a last hidden state without the final norm.
        network.config.tie_last_hidden_states = False
    save_network(network, folder, state)
    if backbone.residue_ids is not None:  # batches came in the ESM alphabet; the ids are another tokenizer's
        tokenizer = residue_tokenizer(BackboneSection(source=str(source.folder)))
    tokenizer.save(folder)
    (folder / "README.md").write_text(_CARD.format(name=source.name, layer=layer, layers=layers), encoding="utf-8")
