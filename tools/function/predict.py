"""Predict the functions of proteins by a run of the task terms, in CAFA's format.

Writes protein, term and score with three digits, tab-separated: for each protein at most --predict.terms terms, from
the highest score down. No term scores above its parents. Memory grows with the vectors of the proteins alone. Until the
file is complete everything lies in OUTPUT.partial, where the same command resumes.

Examples:
  esmeray function predict runs/function --predict.input proteins.fasta --predict.output functions.tsv
  esmeray function predict runs/function --predict.input proteins.fasta.gz --predict.output homology.tsv \
--predict.part homology --predict.terms 100
"""

from pathlib import Path

from common.publishing import refuse_file
from common.text import counted
from tools.grammar import Overwriting, parse
from train_config.command_schema import PredictTermsSettings

MADE_BY = "predict_function"


class Arguments(Overwriting):
    """The run."""

    run: Path
    """Folder of a run of the task terms, trained with train_config/function.yaml."""


def main(argv: list[str]) -> int:
    plain, settings = parse(argv, "function predict", __doc__, Arguments, PredictTermsSettings)
    output = settings.predict.output
    refuse_file(output, MADE_BY, plain.overwrite)
    from inference.function.prediction import predict  # here: it loads torch

    number = predict(
        plain.run,
        settings.predict.input,
        output,
        terms=settings.predict.terms,
        part=settings.predict.part,
        ingest=settings.data.ingest,
        overwrite=plain.overwrite,
    )
    print(f"{output}: {counted(number, 'protein{s}')}")
    return 0
