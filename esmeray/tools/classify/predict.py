"""Predict the labels of a file by a trained classifier.

FASTA, CSV, TSV or Parquet goes in (also compressed); a row for each record comes out, in the order of the file, as CSV,
TSV or Parquet: id, label and the probability of each class. Memory is that of some thousand records, however long the
file. The output appears under its name when it is complete, and beside it .NAME.esmeray.json, by which --overwrite
knows it. The settings of the run say where a table has its texts and ids; options such as --data.labels.id_column
override them.

Examples:
  esmeray classify predict runs/locations --predict.input proteins.fasta.gz --predict.output locations.csv
  esmeray classify predict my-classifier --predict.input proteins.csv --predict.output out.parquet \
--data.labels.id_column name
  esmeray classify predict my-classifier --predict.input all.fasta --predict.output out.csv --predict.device cuda \
--predict.precision bf16 --predict.tokens 65536 --data.ingest.duplicate_ids first
"""

import time
from pathlib import Path

from esmeray.common.errors import ConfigError
from esmeray.common.remote import publish, target_path, uri_of
from esmeray.common.text import counted
from esmeray.dataset.fasta.counts import count_lines
from esmeray.inference.classify.calls import ClassifySection, opened_classification
from esmeray.tools.grammar import Made, OfModel, command
from esmeray.train_config.section import Overrides

SUFFIXES = (".csv", ".tsv", ".parquet")


class ClassifyPredictSection(ClassifySection):
    """Texts, predictions, and how the classifier runs."""

    output: Path
    """File to write: .csv, .tsv or .parquet, or its URI."""


@command("classify predict", __doc__, made_by="predict")
def main(model: OfModel, predict: ClassifyPredictSection, made: Made, overrides: Overrides) -> None:
    output = predict.output
    if not output.name.endswith(SUFFIXES):
        raise ConfigError(f"--predict.output {output}: must end in {' or '.join(SUFFIXES)}")
    target = target_path(output, made.overwrite)
    made.refuse_file(target)
    begun = opened_classification(model, predict, overrides)
    from esmeray.inference.classify.prediction_table import predict_all, writing_predictions  # here: they load torch

    start_s = time.perf_counter()  # loading the model is no part of the rate
    space = begun.pipeline.label_space
    # Part by part: predictions of a large file need not be in memory.
    with (
        made.file(target) as building,
        writing_predictions(building, output.name, space, begun.separator) as write,
    ):
        records, cropped, unknown = predict_all(begun.pipeline, begun.chunks, write)
    publish(output)  # where it is a URI; what stands there was written to a local file so far
    seconds = time.perf_counter() - start_s
    print(
        f"{uri_of(output) or output}: {counted(records, 'prediction{s}')} in {seconds:.1f} s "
        f"({records / seconds:,.0f}/s, {begun.pipeline.model.device}, {begun.pipeline.model.facts.precision})"
    )
    if cropped:
        print(
            f"  {cropped:,} longer than {begun.pipeline.max_length:,} tokens, cropped ({begun.pipeline.crop}); "
            "--data.max_length takes more"
        )
    # The share was checked chunk by chunk.
    if unknown:
        print(f"  {begun.pipeline.model.facts.unknown.line(unknown, 2 * unknown.total())}")
    print("\n".join(f"  {line}" for line in count_lines(begun.stream.counts)))
