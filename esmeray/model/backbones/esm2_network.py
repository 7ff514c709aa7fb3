"""Modules and weights of ESM-2 (and ESM-1b), randomly initialised or read from a Hugging Face folder.

Names of modules and parameters, the order of random draws, and the defaults of config.json match transformers' EsmModel
and EsmForMaskedLM, so that folders and checkpoints are interchangeable. transformers' own models take seconds to import
in each worker and each command. The forward pass is in :mod:`esmeray.model.backbones.esm2`.
"""

from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, PositiveInt, PrivateAttr, ValidationError
from torch import Tensor, nn

from esmeray.common.errors import ConfigError, DataError, refusal
from esmeray.dataset.tokens.esm import EOS, MASK, PAD, VOCABULARY
from esmeray.dataset.tokens.model_folder import CONFIG_FILE, read_settings
from esmeray.model.backbones.base import Float32Buffers, empty_weights
from esmeray.model.backbones.int8 import int8_copy
from esmeray.model.backbones.source import SOURCE_KEY, config_folder, has_random_weights, random_size
from esmeray.model.backbones.stored_weights import REMEDY, StoredTensor, stored_tensors, warn_left_out
from esmeray.model.backbones.streaming import StreamedLayers
from esmeray.model.section import BackboneSection
from esmeray.train_config.section import Weights

_EXPECTED: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "mask_token_id": MASK,
    "pad_token_id": PAD,
    "is_folding_model": False,
    "is_decoder": False,
}
"""Settings in config.json that identify an ESM-2 with this alphabet."""

_UNREAD: dict[str, Any] = {
    "bos_token_id": None,
    "esmfold_config": None,
    "vocab_list": None,
    "add_cross_attention": False,
    "use_cache": True,
    "chunk_size_feed_forward": 0,
    "is_encoder_decoder": False,
    "id2label": {0: "LABEL_0", 1: "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "problem_type": None,
    "return_dict": True,
    "output_hidden_states": False,
    "output_attentions": False,
}
"""Unused settings of transformers' config with their defaults; they are part of fingerprints."""


class EsmConfig(BaseModel):
    """config.json of an ESM-2, with the defaults of transformers 5.23's EsmConfig."""

    model_config = ConfigDict(extra="allow", strict=True)

    model_type: str = "esm"
    vocab_size: PositiveInt
    mask_token_id: int
    pad_token_id: int
    eos_token_id: int | list[int] | None = EOS
    hidden_size: PositiveInt = 768
    num_hidden_layers: PositiveInt = 12
    num_attention_heads: PositiveInt = 12
    intermediate_size: PositiveInt = 3072
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: PositiveInt = 1026
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    position_embedding_type: str = "absolute"
    emb_layer_norm_before: bool | None = None
    token_dropout: bool | None = False
    tie_word_embeddings: bool = True
    is_folding_model: bool = False
    is_decoder: bool = False
    _name_or_path: str = PrivateAttr("")  # the folder that weights were read from, as in transformers

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def to_dict(self) -> dict[str, Any]:
        return _UNREAD | self.model_dump()


def esm2_config(section: BackboneSection) -> EsmConfig:
    """Return the config that the section describes; from the hub, only config.json is fetched.

    Raises ConfigError (impossible size, or a folder with another alphabet or kind of model) or ResourceError (the hub
    can't be reached).
    """
    if has_random_weights(section):
        size = random_size(section)
        return EsmConfig(
            **_EXPECTED,
            hidden_size=size.hidden_size,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            intermediate_size=4 * size.hidden_size,
            hidden_dropout_prob=0.0,  # as in the published configs
            attention_probs_dropout_prob=0.0,
            layer_norm_eps=1e-5,
            position_embedding_type="rotary",
            emb_layer_norm_before=False,
            token_dropout=True,
        )
    path = config_folder(section) / CONFIG_FILE
    # config.json omits transformers' defaults, which are the only supported values of these two.
    settings = {"is_folding_model": False, "is_decoder": False} | read_settings(path, SOURCE_KEY)
    for key, value in _EXPECTED.items():
        if settings.get(key) != value:
            raise ConfigError(f"{SOURCE_KEY}: {path} has {key} {settings.get(key)!r}, but ESM-2 has {value!r}")
    # Older name of the weights' dtype; the run's precision overrides it.
    settings.pop("torch_dtype", None)
    try:
        config = EsmConfig(**settings | {"vocab_list": None, "esmfold_config": None})
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"{SOURCE_KEY}: {path} is not a valid esm config ({key}: {refusal(problem)})") from error
    if config.hidden_size % config.num_attention_heads:
        raise ConfigError(
            f"{SOURCE_KEY}: {path} has hidden_size {config.hidden_size}, which is not divisible by "
            f"{config.num_attention_heads} heads"
        )
    return config


class _Embeddings(nn.Module):
    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        pad = config.pad_token_id
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=pad)
        self.layer_norm = _norm(config) if config.emb_layer_norm_before else None
        self.position_embedding_type = config.position_embedding_type
        self.padding_idx = pad
        if config.position_embedding_type == "absolute":
            self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size, padding_idx=pad)
        self.token_dropout = config.token_dropout
        self.mask_token_id = config.mask_token_id


class _Rotary(Float32Buffers):
    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        # On the CPU even if weights are left out: buffers are computed, never loaded.
        exponents = torch.arange(0, config.head_size, 2, dtype=torch.float, device="cpu") / config.head_size
        self.register_buffer("inv_freq", 1.0 / (config.rope_theta**exponents))


class _SelfAttention(nn.Module):
    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        self.attention_head_size = config.head_size
        self.query, self.key, self.value = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(3))
        self.dropout = config.attention_probs_dropout_prob


def _dense(config: EsmConfig, inputs: int, outputs: int) -> nn.ModuleDict:
    """Return a linear layer, and the dropout before the residual connection."""
    return nn.ModuleDict({"dense": nn.Linear(inputs, outputs), "dropout": nn.Dropout(config.hidden_dropout_prob)})


class EsmLayer(nn.Module):
    """Modules of a layer; the forward is in :mod:`esmeray.model.backbones.esm2`.

    Modules that only hold others are dictionaries, whose entries are attributes, too.
    """

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.attention = nn.ModuleDict(
            {
                "self": _SelfAttention(config),
                "output": _dense(config, config.hidden_size, config.hidden_size),
                "LayerNorm": _norm(config),
            }
        )
        self.intermediate = _dense(config, config.hidden_size, config.intermediate_size)
        self.output = _dense(config, config.intermediate_size, config.hidden_size)
        self.LayerNorm = _norm(config)


def _contact_head(config: EsmConfig) -> nn.ModuleDict:
    return nn.ModuleDict({"regression": nn.Linear(config.num_hidden_layers * config.num_attention_heads, 1)})


class EsmModel(nn.Module):
    """Embeddings and layers; named like transformers' class, since exports contain the name."""

    library = "transformers.models.esm.modeling_esm"

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = _Embeddings(config)
        self.rotary_embeddings = _Rotary(config) if config.position_embedding_type == "rotary" else None
        layers = nn.ModuleList(EsmLayer(config) for _ in range(config.num_hidden_layers))
        self.encoder: Any = nn.ModuleDict({"layer": layers, "emb_layer_norm_after": _norm(config)})
        self.contact_head = _contact_head(config)
        _draw(self, config)

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings.word_embeddings


class _LanguageModelHead(nn.Module):
    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.layer_norm = _norm(config)
        self.decoder = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, features_TD: Tensor) -> Tensor:
        hidden_TD = self.dense(features_TD)
        # Written out, as in transformers: torch's GELU differs in the last bits, which would change recorded losses.
        hidden_TD = hidden_TD * 0.5 * (1.0 + torch.erf(hidden_TD / 2**0.5))
        return self.decoder(self.layer_norm(hidden_TD)) + self.bias


class EsmForMaskedLM(nn.Module):
    """The model with its masked-language-model head.

    ``drawn_weights``: names of weights that the folder lacks, which are random.
    """

    def __init__(self, config: EsmConfig) -> None:
        super().__init__()
        self.drawn_weights: frozenset[str] = frozenset()
        self.esm = EsmModel(config)
        self.lm_head = _LanguageModelHead(config)
        _draw(self.lm_head, config)
        self._tie()

    @classmethod
    def from_folder(
        cls, config: EsmConfig, folder: Path, *, stream: bool = False, weights: Weights = "stored"
    ) -> "EsmForMaskedLM":
        """Return the network with the safetensors of a local folder, in fp32 on the CPU; missing heads are random.

        ``stream``: read layers when they are needed; ``weights``: format of their weights. Raises DataError (damaged,
        incomplete, or shapes that differ from the config).
        """
        with empty_weights():  # weights that are read need no initialisation
            network = cls(config)
        network.esm.contact_head = _contact_head(config)
        _draw(network.esm.contact_head, config)
        network.lm_head = _LanguageModelHead(config)
        _draw(network.lm_head, config)
        stored = network._stored(folder)
        if stream or weights == "int8":
            prefix = "esm.encoder.layer."
            of_layers = {name: tensor for name, tensor in stored.items() if name.startswith(prefix)}
            stored = {name: tensor for name, tensor in stored.items() if not name.startswith(prefix)}
            if weights == "int8":
                of_layers = int8_copy(of_layers)
            of_layers = {name.removeprefix(prefix): tensor for name, tensor in of_layers.items()}
            network.esm.encoder.layer = StreamedLayers(network.esm.encoder.layer, of_layers, held=not stream)
        network.load_state_dict({name: t.read().float() for name, t in stored.items()}, strict=False, assign=True)
        network._tie()
        config._name_or_path = str(folder)
        return network

    def _stored(self, folder: Path) -> dict[str, StoredTensor]:
        """Return the folder's tensors of this network; refuse wrong shapes and missing layers."""
        # 8-bit weights of other programs have another kind of scales.
        tensors = {name: tensor for name, tensor in stored_tensors(folder).items() if tensor.dtype != torch.int8}
        shapes = {name: tuple(tensor.shape) for name, tensor in self.state_dict().items() if name != self._tied}
        missing = [name for name in shapes if name not in tensors]
        needed = [name for name in missing if not name.startswith(("lm_head.", "esm.contact_head.", "esm.rotary_"))]
        if needed:
            raise DataError(f"the weights in {folder} lack {min(needed).removeprefix('esm.')}; {REMEDY}")
        used = {name: tensors[name] for name in shapes if name in tensors}
        for name, tensor in used.items():
            if tensor.shape != shapes[name]:
                raise DataError(
                    f"the weights in {folder} do not have the shape in config.json for "
                    f"{name.removeprefix('esm.')}; {REMEDY}"
                )
        self.drawn_weights = frozenset(missing)
        warn_left_out(folder, (name.removeprefix("esm.") for name in tensors.keys() - shapes.keys()))
        return used

    @property
    def _tied(self) -> str | None:
        return "lm_head.decoder.weight" if self.esm.config.tie_word_embeddings else None

    def _tie(self) -> None:
        if self._tied:
            self.lm_head.decoder.weight = self.esm.embeddings.word_embeddings.weight


def _norm(config: EsmConfig) -> nn.LayerNorm:
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)


@torch.no_grad()
def _draw(modules: nn.Module, config: EsmConfig) -> None:
    """Initialise linear layers and embeddings in transformers' order, the order of their creation."""
    for module in modules.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.weight.normal_(std=config.initializer_range or 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            module.bias.zero_()
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx].zero_()
