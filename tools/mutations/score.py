"""Score mutants of a protein by a masked language model, and evaluate the scores beside measured values.

A score is log p(mutant) - log p(wild type), summed over the mutations: 0 is as good as the wild type, above is better.
A row for each of the table comes out, in its order, as CSV, TSV or Parquet: the mutant, measured values and other
scores where they are named, and the score; of several models their mean and the score of each. A model that esmeray
mutations fit made predicts measured values in place of scores. The same command resumes a job that was ended.

Examples:
  esmeray mutations score runs/lm --score.sequence wild.fasta --score.table mutants.csv --score.output out.csv
  esmeray mutations score facebook/esm2_t12_35M_UR50D --score.sequence wild.fasta --score.table mutants.csv \
--score.output scores.parquet --score.measured_column DMS_score --score.more_models facebook/esm2_t6_8M_UR50D
  esmeray mutations score runs/lm --score.sequence wild.fasta --score.table mutants.csv --score.output indels.csv \
--score.sequence_column mutated_sequence --score.method pseudo
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from esmeray.common.errors import ConfigError
from esmeray.common.text import counted
from esmeray.inference.mutations.section import MutationScoreSection, MutationsSection
from esmeray.inference.mutations.table import MutantTable, read_mutants, write_scores
from esmeray.run_folder.job import unfinished
from esmeray.tools.grammar import Made, command

if TYPE_CHECKING:
    from esmeray.inference.mutations.gaussian_process import Prediction  # it loads SciPy

SUFFIXES = (".csv", ".tsv", ".parquet")


OfMaskedModel = Annotated[
    Path,
    Field(
        description="A masked language model: folder, hub name, run or export; or a folder that esmeray mutations fit "
        "made."
    ),
]


@command("mutations score", __doc__, made_by="score_mutations")
def main(model: OfMaskedModel, score: MutationScoreSection, made: Made) -> None:
    # The ending is the format: nothing else says which is meant.
    if not score.output.name.endswith(SUFFIXES):
        raise ConfigError(f"--score.output {score.output}: must end in {' or '.join(SUFFIXES)}")
    made.refuse_file(score.output)
    start_s = time.perf_counter()
    measured = [] if score.measured_column is None else [score.measured_column]
    numbers = {**dict.fromkeys(measured, "score.measured_column"), **dict.fromkeys(score.compare, "score.compare")}
    sources = [str(model), *score.more_models]
    with unfinished(score.output, job_of("score", sources, score)) as folder:
        # What is wrong with the table is reported before torch is loaded.
        table = read_mutants(score, folder, "score", numbers)
        from esmeray.inference.mutations.fitted import predictions_of

        predicted = predictions_of(sources, table.variants, score, folder, table.numbers)
        scores_N = np.mean([prediction.mean for prediction in predicted], axis=0)
        with made.file(score.output) as building:
            write_scores(building, score.output.name, _columns(table, scores_N, predicted))
    scored = f"{counted(len(table.texts), 'mutant{s}')} in {time.perf_counter() - start_s:.1f} s"
    print("\n".join([f"{score.output}: {scored} ({score.method})", *table.lines()]))
    if score.measured_column is not None:
        from esmeray.inference.mutations.metrics import evaluations_of, summary_lines

        scores = {"model": scores_N, **{name: table.numbers[name] for name in score.compare}}
        measured_N = table.numbers[score.measured_column]
        print("\n".join(summary_lines(evaluations_of(scores, measured_N, table.proteins, samples=score.bootstrap))))


def job_of(command: str, sources: list[str], section: MutationsSection) -> str:
    """The name of a job: each method and model has rows of its own in the unfinished folder."""
    return f"mutations {command} by {section.method} of {' '.join(sources)}"


def _columns(table: MutantTable, scores_N: NDArray[np.float64], predicted: "Sequence[Prediction]") -> dict[str, Any]:
    columns: dict[str, Any] = {**table.names(), **table.numbers}
    name = "model_score" if "score" in columns else "score"  # the table may have measured ones of this name
    columns[name] = scores_N
    if len(predicted) > 1:  # of one model they are the mean
        columns |= {f"{name}_{number}": prediction.mean for number, prediction in enumerate(predicted, 1)}
    elif np.isfinite(predicted[0].low).any():  # a fitted model's, where one predicts
        columns |= {f"{name}_low": predicted[0].low, f"{name}_high": predicted[0].high}
    return columns
