"""One small model per architecture that the classifier supports, with weights that make every parameter matter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BertConfig,
    CamembertConfig,
    ElectraConfig,
    EsmcConfig,
    EsmConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    ModernBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    RobertaConfig,
    T5Config,
    XLMRobertaConfig,
)

from esmeray.dataset.packed_batch import PackedBatch
from esmeray.dataset.tokens.esm import packed_from_tokens, sequence_lengths
from esmeray.model.backbones.huggingface_loading import masked_lm_class, model_class
from tests.model.support import segments

VOCABULARY_SIZE = 40
PAD = 1
POSITIONS = 160
FIRST_WORD = 5
"""First id that is never a special token."""

_SIZE: dict[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "pad_token_id": PAD,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_BERT = {**_SIZE, "max_position_embeddings": POSITIONS}
_ROBERTA = {**_SIZE, "max_position_embeddings": POSITIONS + PAD + 1}
_ESM = {
    "vocab_size": 33,
    "mask_token_id": 32,
    "position_embedding_type": "rotary",
    "token_dropout": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_GPT2 = {"vocab_size": VOCABULARY_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS}
_T5 = {
    "vocab_size": VOCABULARY_SIZE,
    "pad_token_id": PAD,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
}
_GROUPED = {**_SIZE, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
_MODERNBERT = {
    "layer_types": ["full_attention"] * 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "cls_token_id": None,
    "sep_token_id": None,
}

_CONFIGS: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "bert": (BertConfig, _BERT),
    "camembert": (CamembertConfig, _ROBERTA),
    "electra": (ElectraConfig, {**_BERT, "embedding_size": 16}),
    "esm": (EsmConfig, {**_SIZE, **_ESM}),
    "esmc": (EsmcConfig, _SIZE),
    "gpt2": (GPT2Config, {**_GPT2, "bos_token_id": None, "eos_token_id": None}),
    "llama": (LlamaConfig, _GROUPED),
    "mistral": (MistralConfig, _GROUPED),
    "modernbert": (ModernBertConfig, {**_SIZE, **_MODERNBERT}),
    "qwen2": (Qwen2Config, _GROUPED),
    "qwen3": (Qwen3Config, {**_GROUPED, "head_dim": 16}),
    "roberta": (RobertaConfig, _ROBERTA),
    "t5": (T5Config, {**_T5, "feed_forward_proj": "gated-gelu"}),
    "xlm-roberta": (XLMRobertaConfig, _ROBERTA),
}


def small_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    kind, settings = _CONFIGS[model_type]
    return kind(**{**settings, **changes})


def small_model(
    model_type: str, seed: int = 0, kind: Callable[[PreTrainedConfig], type] = model_class, **changes: Any
) -> PreTrainedModel:
    """A model in evaluation mode, with Hugging Face's own attention."""
    config = small_config(model_type, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind(config)(config).eval()
        for parameter in model.parameters():  # also biases and norms, whose initial constants would hide a loss
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def save_masked_lm(folder: Path, model_type: str, **changes: Any) -> PreTrainedModel:
    """Save a masked language model as a Hugging Face folder."""
    model = small_model(model_type, kind=masked_lm_class, **changes)
    model.save_pretrained(folder)
    return model


def save_small_model(folder: Path, model_type: str, **changes: Any) -> PreTrainedModel:
    model = small_model(model_type, **changes)
    model.save_pretrained(folder)
    return model


def token_batch(lengths: list[int], seed: int = 0, vocabulary_size: int = 33) -> PackedBatch:
    """A packed batch of random tokens that are not special."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(FIRST_WORD, vocabulary_size - 1, (length,), generator=generator) for length in lengths]
    return packed_from_tokens(torch.cat(tokens).numpy(), sequence_lengths(tokens))


def features_alone(model: PreTrainedModel, batch: PackedBatch) -> list[Tensor]:
    """Features of each sequence alone, computed by Hugging Face's model."""
    return [model(input_ids=tokens[None]).last_hidden_state[0] for tokens in segments(batch.tokens, batch)]
