"""Fit a model to measured mutants of a protein: ridge on features and the zero-shot score.

The features are embeddings or the residues of each position (Hsu et al. 2022). It is cross-validated on folds as
ProteinGym's, beside the zero-shot score alone and ridge on one-hot. Writes a folder that esmeray mutations score and
scan take as a model, with report.md and evaluation.json. The same command resumes a job that was ended.

Examples:
  esmeray mutations fit facebook/esm2_t12_35M_UR50D --fit.sequence wild.fasta --fit.table measured.csv \
--fit.output fitted
  esmeray mutations fit facebook/esm2_t12_35M_UR50D --fit.sequence wild.fasta --fit.table measured.csv \
--fit.output fitted --fit.measured_column DMS_score --fit.folds random --fit.sizes 48 96 240
"""

from esmeray.common.publishing import refuse_existing
from esmeray.inference.mutations.section import MutationFitSection
from esmeray.inference.mutations.table import read_mutants, read_protein
from esmeray.model.export.exported_folder import MADE_BY
from esmeray.run_folder.job import unfinished
from esmeray.tools.grammar import Overwrite, command
from esmeray.tools.mutations.score import OfMaskedModel


@command("mutations fit", __doc__)
def main(model: OfMaskedModel, fit: MutationFitSection, overwrite: Overwrite = False) -> None:
    refuse_existing(fit.output, MADE_BY, overwrite)
    # Columns with numbers, and the option that a message names where one is missing.
    numbers = {fit.measured_column: "fit.measured_column"}
    if fit.zero_shot_column is not None:
        numbers[fit.zero_shot_column] = "fit.zero_shot_column"
    with unfinished(fit.output, f"mutations fit of {model}") as folder:
        protein = read_protein(fit, folder)
        table = read_mutants(fit, protein, "fit", numbers)
        from esmeray.inference.mutations.fitted import export, fit_table, report_lines  # here: it loads torch

        fitted, evaluations = fit_table(str(model), protein, table, fit, folder)
        export(fitted, evaluations, fit.output, overwrite)
    print("\n".join([*table.lines(), *report_lines(evaluations), f"written: {fit.output}"]))
