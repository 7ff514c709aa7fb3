"""Export of a trained model as a Hugging Face folder without pickled files.

    config.json, model.safetensors    EsmForMaskedLM (masked_lm), EsmModel (the autoencoder's backbone), or the classes
                                      of another architecture
    or adapter_config.json, adapter_model.safetensors  a LoRA adapter, for peft, which names its base
    vocab.txt, tokenizer_config.json  EsmTokenizer, or the tokenizer of the backbone's source
    autoencoder.safetensors, autoencoder_config.json  additional files for ESM2Autoencoder.from_pretrained
    modules.json ...                  pooling for sentence-transformers, see write_sentence_modules
    README.md                         model card
    config.yaml                       the run's resolved config
    esmeray_model.json                the task, which tells Esmeray how to open the folder
    esmeray.json                      list of these files, which identifies an export (common.publishing)

The folder is built under a temporary name next to the target, flushed to disk and renamed: a killed export leaves
nothing under the final name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from esmeray.dataset.tokens.base import EsmSequenceTokenizer, SequenceTokenizer
from esmeray.model.backbones.lora import base_state, merged_state, write_adapter
from esmeray.model.export.exported_folder import exported_folder
from esmeray.model.export.model_card import example_text, model_card, opening_call, python_block
from esmeray.model.task_model import ResidueModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MODULES = {"Transformer": "", "WordWeights": "1_WordWeights", "Pooling": "2_Pooling"}
_ANY_LENGTH = 1_000_000
"""Maximum length for networks without a limit. Without it the tokenizer would silently truncate at its own length."""

_OPEN_NETWORK = """{peft}from transformers import AutoTokenizer, {opener}

folder = "FOLDER"
tokenizer = AutoTokenizer.from_pretrained(folder)
network = {call}
{output} = network(**tokenizer("{text}", return_tensors="pt")).{attribute}
"""


def export(
    model: ResidueModel,
    folder: str | Path,
    tokenizer: SequenceTokenizer | None = None,
    *,
    resolved_config: str | None = None,
    model_card_facts: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write ``model`` as a Hugging Face folder, and return its absolute path.

    Args:
        model: model with whole (not partitioned) weights. It is not changed.
        folder: path of the new folder.
        tokenizer: the backbone's tokenizer (:func:`esmeray.model.backbones.loading.residue_tokenizer`); the ESM
            alphabet if None.
        resolved_config: the run's config as YAML, stored as config.yaml.
        model_card_facts: sections of the card on data, steps, metrics and versions.
        overwrite: replace an earlier export.

    Raises the same errors as :func:`~esmeray.model.export.exported_folder.exported_folder`.
    """
    # Imported here: importing transformers' models takes seconds, and a run needs it only at its end.
    from esmeray.model.backbones.huggingface_loading import save_network

    with exported_folder(folder, model.task, overwrite, resolved_config) as (building, target):
        tokenizer = tokenizer or EsmSequenceTokenizer()
        network = model.network()
        base = None
        if model.backbone.lora_export == "adapter":
            base = write_adapter(
                model.backbone, building, lambda folder: save_network(network, folder, base_state(network)), network
            )
        else:
            save_network(network, building, merged_state(network))  # in a copy: the model keeps its adapter
            write_sentence_modules(building, tokenizer, model.backbone.hidden_size, model.backbone.longest)
        model.save(building)
        # EsmTokenizer truncates to ESM-2's training length. Other tokenizers keep the length of their source.
        if isinstance(tokenizer, EsmSequenceTokenizer):
            tokenizer.save(building, model_max_length=1024)
        else:
            tokenizer.save(building)
        card = _card(model, network, base, example_text(tokenizer), model_card_facts or {})
        (building / "README.md").write_text(card, encoding="utf-8")
    return target


def _card(
    model: ResidueModel, network: "PreTrainedModel", base: str | None, text: str, facts: Mapping[str, Any]
) -> str:
    """Return README.md. ``base``: base of an adapter as Python source; None without an adapter."""
    config = model.backbone.config
    is_esm2 = config.model_type == "esm"
    family = "ESM-2" if is_esm2 else type(model.backbone.model).__name__
    size = f"{config.num_hidden_layers} layers, {config.hidden_size} channels, {config.num_attention_heads} heads"
    opener, call = opening_call(network, base or "folder")

    def network_code(output: str, attribute: str) -> str:
        return python_block(
            _OPEN_NETWORK.format(
                peft="from peft import PeftModel\n" if base else "",
                opener=opener,
                call=call if base is None else f"PeftModel.from_pretrained({call}, folder)",
                text=text,
                output=output,
                attribute=attribute,
            )
        )

    card = model.card(family, size, network_code)
    tags = ["protein", "esm2" if is_esm2 else config.model_type, *card.tags]
    return model_card(card.pipeline_tag, tags, card.description, facts, card.opening)


def write_sentence_modules(folder: Path, tokenizer: SequenceTokenizer, channels: int, longest: int | None) -> None:
    """Write files that make sentence-transformers pool as Esmeray does: mean over residues, without special tokens.

        modules.json                sequence of modules: network, token weights, pooling
        sentence_bert_config.json   maximum length of the network's input
        1_WordWeights/config.json   weight 0 for special tokens around a sequence, 1 for other tokens
        2_Pooling/config.json       mean with these weights

    Without the weights, sentence-transformers would include special tokens in the mean. ``channels``: channels of a
    vector. ``longest``: maximum number of tokens, including special ones; None for any.
    """
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{name}"}
        for index, (name, path) in enumerate(_MODULES.items())
    ]
    around = {tokenizer.tokens[token]: 0.0 for token in (*tokenizer.prefix, *tokenizer.suffix)}
    contents = {
        "modules.json": modules,
        "sentence_bert_config.json": {"max_seq_length": longest or _ANY_LENGTH, "do_lower_case": False},
        "1_WordWeights/config.json": {
            "vocab": list(tokenizer.tokens),
            "word_weights": around,
            "unknown_word_weight": 1,
        },
        "2_Pooling/config.json": {"word_embedding_dimension": channels, "pooling_mode_mean_tokens": True},
    }
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
