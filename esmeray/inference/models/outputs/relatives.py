"""Vectors that are close for proteins of the same group, from a model fitted by ``embed fit``."""

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
