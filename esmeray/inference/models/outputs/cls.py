"""First token of each protein, if the tokenizer adds a special token before the sequence."""

from esmeray.inference.models.kinds import OutputKind
from esmeray.model.heads.pooling import first_token

KIND = OutputKind(
    "first token (<cls>)",
    rows=lambda model, features_TD, inputs: first_token(features_TD, inputs.batch),
    channels=lambda model: model.facts.hidden_size if model.tokenizer.prefix else None,
)
