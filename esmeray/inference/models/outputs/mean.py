"""Mean over the residues of a protein."""

from esmeray.inference.models.kinds import OutputKind
from esmeray.model.heads.pooling import mean_over_residues

KIND = OutputKind(
    "mean over the residues; special tokens left out",
    rows=lambda model, features_TD, inputs: mean_over_residues(features_TD, inputs.batch, *model.around),
)
