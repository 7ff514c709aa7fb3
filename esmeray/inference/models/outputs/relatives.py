"""Vectors that lie close for proteins of one group, of a model that ``embed fit`` made."""

from esmeray.inference.models.kinds import OutputKind
from esmeray.model.heads.pooling import mean_over_residues

KIND = OutputKind(
    "regression of the groups of labelled proteins; special tokens left out",
    rows=lambda model, features_TD, inputs: model.heads["relatives"](
        mean_over_residues(features_TD, inputs.batch, *model.around)
    ),
    reads="last",
    head="relatives",
    channels=lambda model: model.heads["relatives"].coefficients.shape[1],
)
