"""Predict the functions of proteins by a run that train_config/function.yaml trained, in CAFA's format.

Writes protein, term and score with three digits, tab-separated: for each protein at most --predict.terms terms, from
the highest score down. No term scores above its parents. With --predict.format cafa6 the file is one to submit to that
competition. Memory grows with the vectors of the proteins alone. Until the file is complete everything lies in
OUTPUT.partial, where the same command resumes.

Examples:
  esmeray function predict runs/function --predict.input proteins.fasta --predict.output functions.tsv
  esmeray function predict runs/function --predict.input proteins.fasta.gz --predict.output homology.tsv \
--predict.part homology --predict.terms 100
  esmeray function predict runs/function --predict.input proteins.fasta --predict.output submission.tsv \
--predict.format cafa6
"""

from esmeray.common.text import counted
from esmeray.function.section import PredictTermsSection
from esmeray.tools.grammar import IngestedSection, Made, OfRun, command


@command("function predict", __doc__, made_by="predict_function")
def main(run: OfRun, predict: PredictTermsSection, data: IngestedSection, made: Made) -> None:
    # The prediction does so as well, but after torch is loaded.
    made.refuse_file(predict.output)
    from esmeray.inference.function import prediction  # here: it loads torch

    number = prediction.predict(run, predict, data.ingest, overwrite=made.overwrite)
    print(f"{predict.output}: {counted(number, 'protein{s}')}")
