"""Fit a model to measured mutants of a protein, or of several: a Gaussian process that knows how sure it is.

It learns from the residues won and lost at each position, from a zero-shot score and, unless features are one_hot, from
embeddings, of mutants with any number of mutations. Rows of one mutant are averaged, and count with their number. The
model is cross-validated on folds as ProteinGym's, next to the zero-shot score alone and ridge on one-hot. Writes a
folder that esmeray mutations score, scan and propose take as a model, with report.md, evaluation.json and, for sizes,
learning_curve.png. The same command resumes a job that was ended.

Examples:
  esmeray mutations fit facebook/esm2_t12_35M_UR50D --fit.sequence wild.fasta --fit.table measured.csv \
--fit.output fitted
  esmeray mutations fit facebook/esm2_t12_35M_UR50D --fit.sequence wild.fasta --fit.table measured.csv \
--fit.output fitted --fit.measured_column DMS_score --fit.folds random --fit.sizes 48 96 240
  esmeray mutations fit --fit.sequence wild.fasta --fit.table measured.csv --fit.output fitted \
--fit.features one_hot --fit.zero_shot_column eve
"""

from esmeray.inference.mutations.calls import fit_mutants
from esmeray.inference.mutations.section import MutationFitSection
from esmeray.tools.grammar import Overwrite, command
from esmeray.tools.mutations.score import MaybeMaskedModel


@command("mutations fit", __doc__)
def main(fit: MutationFitSection, model: MaybeMaskedModel = None, overwrite: Overwrite = False) -> None:
    fitted = fit_mutants(model, **dict(fit), overwrite=overwrite)
    from esmeray.inference.mutations.fitted import report_lines  # here: it loads torch

    print("\n".join([*fitted.notes, *report_lines(fitted.evaluations), f"written: {fit.output}"]))
