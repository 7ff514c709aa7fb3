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
from esmeray.tools.grammar import command
from esmeray.tools.mutations.score import OnMaskedModel


class Arguments(OnMaskedModel):
    """The model, and the measured mutants."""

    fit: MutationFitSection


@command("mutations fit", __doc__, Arguments)
def main(arguments: Arguments) -> None:
    section = arguments.fit
    refuse_existing(section.output, MADE_BY, arguments.overwrite)
    # Columns with numbers, and the option that a message names where one is missing.
    numbers = {section.measured_column: "fit.measured_column"}
    if section.zero_shot_column is not None:
        numbers[section.zero_shot_column] = "fit.zero_shot_column"
    with unfinished(section.output, f"mutations fit of {arguments.model}") as folder:
        protein = read_protein(section, folder)
        table = read_mutants(section, protein, "fit", numbers)
        from esmeray.inference.mutations.fitted import export, fit_table, report_lines  # here: it loads torch

        fitted, evaluations = fit_table(str(arguments.model), protein, table, section, folder)
        export(fitted, evaluations, section.output, arguments.overwrite)
    print("\n".join([*table.lines(), *report_lines(evaluations), f"written: {section.output}"]))
