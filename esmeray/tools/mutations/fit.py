"""Fit a Gaussian process to measured mutants of one or several proteins; its predictions have intervals.

It learns from the residues gained and lost at each position, from a zero-shot score and, unless features are one_hot,
from embeddings. Mutants may have any number of mutations. Replicates of a mutant are averaged and weighted by their
number. The model is cross-validated on ProteinGym's kinds of folds and compared with the zero-shot score and with ridge
regression on one-hot features.

Writes a folder that esmeray mutations score, scan and propose take as a model, with report.md, evaluation.json and, if
sizes are given, learning_curve.png. The same command resumes an interrupted job.

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
from esmeray.tools.mutations.score import OptionalMaskedModelPath


@command("mutations fit", __doc__)
def main(fit: MutationFitSection, model: OptionalMaskedModelPath = None, overwrite: Overwrite = False) -> None:
    fitted = fit_mutants(model, **dict(fit), overwrite=overwrite)
    from esmeray.inference.mutations.fitted import report_lines  # here: it loads torch

    print("\n".join([*fitted.notes, *report_lines(fitted.evaluations), f"written: {fit.output}"]))
