"""Pseudo-log-likelihood of a protein by its masked language model, each amino acid masked in turn."""

from esmeray.inference.models.kinds import OutputKind
from esmeray.inference.models.masking import likelihoods_of_batch

KIND = OutputKind(
    "pseudo-log-likelihood by the masked language model: mean per amino acid, sum, and number of amino acids; other "
    "letters and special tokens left out",
    rows=likelihoods_of_batch,
    reads="tokens",
    head="masked_lm",
    masked=True,
    channels=lambda model: 3 if model.tokenizer.one_token_per_residue and model.tokenizer.mask is not None else None,
)
