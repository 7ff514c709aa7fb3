"""Logits of the masked language model per residue."""

from esmeray.inference.models.kinds import OutputKind

KIND = OutputKind(
    "logits of the masked language model for each residue; special tokens left out",
    rows=lambda model, logits_TK, inputs: logits_TK[inputs.residues],
    per="residue",
    reads="last",
    features=lambda model, hidden_TD: model.heads["masked_lm"](hidden_TD),
    head="masked_lm",
    channels=lambda model: int(model.backbone.config.vocab_size) if model.tokenizer.one_token_per_residue else None,
)
