"""Score mutants of a protein with a masked language model, and compare the scores with measured values.

A score is log p(mutant) - log p(wild type), summed over the mutations: 0 is as good as the wild type, above is better.
A model made by esmeray mutations fit predicts measured values instead.

The output is the table with all its columns and rows, as CSV, TSV or Parquet, and a column score, or model_score if the
table already has a column score. With several models it has their mean and the score of each. The score is empty for a
mutant without one, such as a stop. Metrics count mutants: replicates are averaged. The same command resumes an
interrupted job.

Examples:
  esmeray mutations score runs/lm --score.sequence wild.fasta --score.table mutants.csv --score.output out.csv
  esmeray mutations score facebook/esm2_t12_35M_UR50D --score.sequence wild.fasta --score.table mutants.csv \
--score.output scores.parquet --score.measured_column DMS_score --score.more_models facebook/esm2_t6_8M_UR50D
  esmeray mutations score runs/lm --score.sequence wild.fasta --score.table mutants.csv --score.output indels.csv \
--score.sequence_column mutated_sequence --score.method pseudo
"""

import re
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from esmeray.common.errors import ConfigError
from esmeray.common.statistics import RESAMPLINGS
from esmeray.common.text import counted
from esmeray.inference.mutations.calls import job_of
from esmeray.inference.mutations.section import MutationScoreSection
from esmeray.run_folder.job import unfinished
from esmeray.tools.grammar import OPTIONAL_TARGET, OutputWriter, command

SUFFIXES = (".csv", ".tsv", ".parquet")

MaskedModelPath = Annotated[
    Path,
    Field(description="Masked language model (folder, hub name, run or export), or a folder of esmeray mutations fit."),
]
OptionalMaskedModelPath = Annotated[
    Path | None,
    Field(
        description="A masked language model: folder, hub name, run or export. Not needed with features one_hot and a "
        "zero_shot_column."
    ),
    OPTIONAL_TARGET,
]


@command("mutations score", __doc__, made_by="score_mutations")
def main(model: MaskedModelPath, score: MutationScoreSection, writer: OutputWriter) -> None:
    from esmeray.inference.mutations.table import by_row, read_mutants, write_scores  # here: it loads pandas

    # The ending selects the format.
    if not score.output.name.endswith(SUFFIXES):
        raise ConfigError(f"--score.output {score.output}: must end in {' or '.join(SUFFIXES)}")
    writer.refuse_file(score.output)
    numbers: dict[str | None, str] = {score.measured_column: "score.measured_column"}
    numbers |= dict.fromkeys(score.compare, "score.compare")
    sources = [str(model), *score.more_models]
    with unfinished(score.output, job_of("score", sources, score)) as folder:
        # Problems of the table are reported before torch is loaded.
        table = read_mutants(score, score.sequence, folder, "score", numbers, every_column=True)
        taken = {re.sub(r"_(low|high|\d+)$", "", column) for column in table.rows.columns}
        name = "model_score" if "score" in taken else "score"
        if name in taken:
            raise ConfigError(
                f"{score.source}: already has columns score and model_score, which the output adds; rename one"
            )
        from esmeray.inference.mutations.fitted import predict

        predicted = [predict(source, table.variants, score, folder, table.numbers) for source in sources]
        scores_N = np.mean([prediction.mean for prediction in predicted], axis=0)
        new = {name: scores_N}
        if len(predicted) > 1:  # with one model they equal the mean
            new |= {f"{name}_{number}": prediction.mean for number, prediction in enumerate(predicted, 1)}
        elif np.isfinite(predicted[0].low).any():  # only a fitted model has intervals
            new |= {f"{name}_low": predicted[0].low, f"{name}_high": predicted[0].high}
        rows = table.rows.assign(**{key: by_row(values_N, table.number_of_row) for key, values_N in new.items()})
        with writer.file(score.output) as building:
            write_scores(building, score.output.name, rows)
    scored = f"{counted(len(table.variants), 'mutant{s}')} of {counted(len(table.rows), 'row{s}')}"
    print("\n".join([f"{score.output}: {scored} ({score.method})", *table.lines()]))
    if score.measured_column is not None:
        from esmeray.inference.mutations.metrics import evaluations_of, summary_lines

        compared = {"model": scores_N, **{name: table.numbers[name] for name in score.compare}}
        measured_N = table.numbers[score.measured_column]
        proteins = [variant.protein.name for variant in table.variants]
        print("\n".join(summary_lines(evaluations_of(compared, measured_N, proteins, samples=RESAMPLINGS))))
