"""Mean embeddings by fair-esm 2.0.0, as its scripts/extract.py computes them with ``--include mean``.

FastaBatchedDataset sorts by length and bounds batches by padded tokens (``--toks_per_batch``, 4096 by default), the
BatchConverter tokenizes, and ESM2 runs in fp32 with its language-model head, which the script does not switch off. Only
writing one file for each protein is left out.

Shape legend: N sequences, D channels.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import EsmForMaskedLM

TOKENS_PER_BATCH = 4096
TRUNCATION = 1022

_LAYER = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "attention.LayerNorm": "self_attn_layer_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "LayerNorm": "final_layer_norm",
}
"""Names of a layer's modules, Hugging Face's to fair-esm's."""


class FairEsmExtract:
    """The work of extract.py between reading the FASTA and writing the files."""

    def __init__(self, network: EsmForMaskedLM, device: str) -> None:
        import esm

        config: Any = network.config
        model = esm.ESM2(config.num_hidden_layers, config.hidden_size, config.num_attention_heads)
        _copy_weights(model, network.state_dict())
        self._esm = esm
        self._layer = config.num_hidden_layers
        self._device = device
        self._model = model.to(device).eval()

    def __call__(self, sequences: Sequence[str]) -> Tensor:
        """(N, D) float32 on the CPU."""
        alphabet = self._model.alphabet
        dataset = self._esm.FastaBatchedDataset([str(number) for number in range(len(sequences))], sequences)
        loader = torch.utils.data.DataLoader(
            dataset,  # type: ignore[arg-type]
            collate_fn=alphabet.get_batch_converter(TRUNCATION),
            batch_sampler=dataset.get_batch_indices(TOKENS_PER_BATCH, extra_toks_per_seq=1),
        )
        means: dict[int, Tensor] = {}
        with torch.no_grad():
            for labels, strings, tokens in loader:
                out = self._model(tokens.to(self._device), repr_layers=[self._layer], return_contacts=False)
                out["logits"].to("cpu")  # as the script does, which then does not use them
                hidden = out["representations"][self._layer].to("cpu")
                for row, label in enumerate(labels):
                    length = min(TRUNCATION, len(strings[row]))
                    # A copy, as in the script: a view would keep the whole batch.
                    means[int(label)] = hidden[row, 1 : length + 1].mean(0).clone()
        return torch.stack([means[number] for number in range(len(sequences))])


def _copy_weights(model: torch.nn.Module, theirs: Mapping[str, Tensor]) -> None:
    """Hugging Face's weights into fair-esm's module; what doesn't matter for features is left as it is."""
    named = {
        "embed_tokens.weight": theirs["esm.embeddings.word_embeddings.weight"],
        "emb_layer_norm_after.weight": theirs["esm.encoder.emb_layer_norm_after.weight"],
        "emb_layer_norm_after.bias": theirs["esm.encoder.emb_layer_norm_after.bias"],
    }
    prefix = "esm.encoder.layer."
    for key, value in theirs.items():
        number, _, rest = key.removeprefix(prefix).partition(".")
        module, _, kind = rest.rpartition(".")
        if key.startswith(prefix) and module in _LAYER:
            named[f"layers.{number}.{_LAYER[module]}.{kind}"] = value
    # Not strict: the head and the contact regression stay as they are; whatever features depend on must be there.
    unknown = model.load_state_dict(named, strict=False)
    missing = [key for key in unknown.missing_keys if key.startswith(("layers.", "emb")) and "rot_emb" not in key]
    if missing or unknown.unexpected_keys:
        raise RuntimeError(f"weights don't fit fair-esm's ESM2: {missing[:1]} {unknown.unexpected_keys[:1]}")
