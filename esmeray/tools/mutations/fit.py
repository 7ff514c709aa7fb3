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

from esmeray.common.publishing import refuse_existing
from esmeray.inference.mutations.section import MutationFitSection
from esmeray.model.export.exported_folder import MADE_BY
from esmeray.run_folder.job import unfinished
from esmeray.tools.grammar import Overwrite, command
from esmeray.tools.mutations.score import MaybeMaskedModel


@command("mutations fit", __doc__)
def main(fit: MutationFitSection, model: MaybeMaskedModel = None, overwrite: Overwrite = False) -> None:
    from esmeray.inference.mutations.table import read_mutants  # here: it loads pandas

    refuse_existing(fit.output, MADE_BY, overwrite)
    with unfinished(fit.output, f"mutations fit of {model}") as folder:
        table = read_mutants(fit, folder, "fit", fit.numbers("fit"), groups=fit.groups)
        from esmeray.inference.mutations.fitted import export, fit_table, report_lines  # here: it loads torch

        fitted, evaluations = fit_table(model, table, fit, folder)
        export(fitted, evaluations, fit.output, overwrite)
    print("\n".join([*table.lines(), *report_lines(evaluations), f"written: {fit.output}"]))
