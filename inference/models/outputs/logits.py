"""Logits of the masked language model for each residue."""

from esmeray.inference.models.kinds import HasOutputs, OutputKind


def _channels(model: HasOutputs) -> int | None:
    has_logits = "masked_lm" in model.heads and model.tokenizer.one_token_per_residue
    return int(model.backbone.config.vocab_size) if has_logits else None


KIND = OutputKind(
    "logits of the masked language model for each residue; special tokens left out",
    rows=lambda model, logits_TK, inputs: logits_TK[inputs.residues],
    per="residue",
    reads="last",
    features=lambda model, hidden_TD: model.heads["masked_lm"](hidden_TD),
    head="masked_lm",
    channels=_channels,
)
