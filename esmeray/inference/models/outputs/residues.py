"""Vector per residue."""

from esmeray.inference.models.kinds import OutputKind

KIND = OutputKind(
    "vector of each residue; special tokens left out",
    rows=lambda model, features_TD, inputs: features_TD[inputs.residues],
    per="residue",
    channels=lambda model: model.facts.hidden_size if model.tokenizer.one_token_per_residue else None,
)
