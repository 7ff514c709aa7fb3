"""Predict the functions of proteins with a run of train_config/function.yaml, in CAFA's format.

Writes protein, term and score with three digits, separated by tabs. Each protein has at most --predict.terms terms,
highest score first. No term scores above its parents. --predict.format cafa6 writes a file to submit to that
competition. Memory holds the vectors of the proteins only. Until the file is complete, results are kept in
OUTPUT.partial, from which the same command resumes.

Examples:
  esmeray function predict runs/function --predict.input proteins.fasta --predict.output functions.tsv
  esmeray function predict runs/function --predict.input proteins.fasta.gz --predict.output homology.tsv \
--predict.part homology --predict.terms 100
  esmeray function predict runs/function --predict.input proteins.fasta --predict.output submission.tsv \
--predict.format cafa6
"""

from esmeray.common.text import counted
from esmeray.function.section import PredictTermsSection
from esmeray.tools.grammar import IngestedSection, OutputWriter, RunPath, command


@command("function predict", __doc__, made_by="predict_function")
def main(run: RunPath, predict: PredictTermsSection, data: IngestedSection, writer: OutputWriter) -> None:
    # Checked before torch is loaded; the prediction checks it again.
    writer.refuse_file(predict.output)
    from esmeray.inference.function import prediction  # here: it loads torch

    number = prediction.predict(run, predict, data.ingest, overwrite=writer.overwrite)
    print(f"{predict.output}: {counted(number, 'protein{s}')}")
