"""Predict the functions of proteins by a run that train_config/function.yaml trained, in CAFA's format.

Writes protein, term and score with three digits, tab-separated: for each protein at most --predict.terms terms, from
the highest score down. No term scores above its parents. Memory grows with the vectors of the proteins alone. Until the
file is complete everything lies in OUTPUT.partial, where the same command resumes.

Examples:
  esmeray function predict runs/function --predict.input proteins.fasta --predict.output functions.tsv
  esmeray function predict runs/function --predict.input proteins.fasta.gz --predict.output homology.tsv \
--predict.part homology --predict.terms 100
"""

from esmeray.common.text import counted
from esmeray.function.section import PredictTermsSection
from esmeray.tools.grammar import IngestedSection, OnRun, command


class Arguments(OnRun):
    """The run, and the proteins."""

    made_by = "predict_function"

    predict: PredictTermsSection
    data: IngestedSection = IngestedSection()


@command("function predict", __doc__, Arguments)
def main(arguments: Arguments) -> None:
    output = arguments.predict.output
    # The prediction does so as well, but after torch is loaded.
    arguments.refuse_file(output)
    from esmeray.inference.function.prediction import predict  # here: it loads torch

    number = predict(arguments.run, arguments.predict, arguments.data.ingest, overwrite=arguments.overwrite)
    print(f"{output}: {counted(number, 'protein{s}')}")
