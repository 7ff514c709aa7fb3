"""Predict the labels of a file with a trained classifier.

The input is FASTA, CSV, TSV or Parquet, also compressed. The output is CSV, TSV or Parquet with a row per record, in
the order of the input: id, label and the probability of each class. Memory holds some thousand records at a time. The
columns of texts and ids in a table are taken from the settings of the run; options such as --data.labels.id_column
override them.

The output appears under its name when it is complete. --overwrite recognizes it by the file .NAME.esmeray.json next to
it.

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
from esmeray.tools.grammar import ModelPath, OutputWriter, command
from esmeray.train_config.section import Overrides

SUFFIXES = (".csv", ".tsv", ".parquet")


class ClassifyPredictSection(ClassifySection):
    """Texts, predictions, and settings of the classifier."""

    output: Path
    """File to write (.csv, .tsv or .parquet), or its URI."""


@command("classify predict", __doc__, made_by="predict")
def main(model: ModelPath, predict: ClassifyPredictSection, writer: OutputWriter, overrides: Overrides) -> None:
    output = predict.output
    if not output.name.endswith(SUFFIXES):
        raise ConfigError(f"--predict.output {output}: must end in {' or '.join(SUFFIXES)}")
    target = target_path(output, writer.overwrite)
    writer.refuse_file(target)
    pipeline, stream, chunks, separator = opened_classification(model, predict, overrides)
    from esmeray.inference.classify.prediction_table import predict_all, writing_predictions  # here: they load torch

    start_s = time.perf_counter()  # the rate excludes loading the model
    space = pipeline.label_space
    # Written chunk by chunk, so that predictions of a large file need not fit into memory.
    with (
        writer.file(target) as building,
        writing_predictions(building, output.name, space, separator, with_sets=predict.coverage is not None) as write,
    ):
        records, cropped, unknown = predict_all(pipeline, chunks, write)
    publish(output)  # uploads the local file if the output is a URI
    seconds = time.perf_counter() - start_s
    print(
        f"{uri_of(output) or output}: {counted(records, 'prediction{s}')} in {seconds:.1f} s "
        f"({records / seconds:,.0f}/s, {pipeline.model.device}, {pipeline.model.facts.precision})"
    )
    if cropped:
        print(
            f"  {cropped:,} longer than {pipeline.max_length:,} tokens, cropped ({pipeline.crop}); "
            "to use more, raise --data.max_length"
        )
    # The share of unknown tokens was checked chunk by chunk; this line reports the total.
    if unknown:
        print(f"  {pipeline.model.facts.unknown.line(unknown, 2 * unknown.total())}")
    print("\n".join(f"  {line}" for line in count_lines(stream.counts)))
