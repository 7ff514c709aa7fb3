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
from itertools import chain, islice
from pathlib import Path

from esmeray.common.errors import ConfigError, DataError
from esmeray.common.remote import publish, target_path, uri_of
from esmeray.common.text import counted
from esmeray.dataset.fasta.counts import count_lines
from esmeray.inference.models.source import config_of, label_space_of
from esmeray.tools.grammar import Made, OfModel, command
from esmeray.train_config.section import DEFAULT_TOKENS, ComputeSection, Overrides, PositiveInt, Precision

SUFFIXES = (".csv", ".tsv", ".parquet")
CHUNK_CHARACTERS = 4_000_000
"""Texts that are sorted and packed together: about 10,000 proteins."""


class ClassifierRunSection(ComputeSection):
    """Settings with which a classifier runs."""

    precision: Precision = "fp32"
    """Precision of the computation."""
    tokens: PositiveInt = DEFAULT_TOKENS
    """Token budget of a batch; a longer text goes alone."""


class ClassifyPredictSection(ClassifierRunSection):
    """Texts, predictions, and how the classifier runs."""

    input: str
    """File, folder or quoted glob, or a URI."""
    output: Path
    """File to write: .csv, .tsv or .parquet, or its URI."""


@command("classify predict", __doc__, made_by="predict")
def main(model: OfModel, predict: ClassifyPredictSection, made: Made, overrides: Overrides) -> None:
    output = predict.output
    if not output.name.endswith(SUFFIXES):
        raise ConfigError(f"--predict.output {output}: must end in {' or '.join(SUFFIXES)}")
    target = target_path(output, made.overwrite)
    made.refuse_file(target)
    # What is wrong with the model's folder, the settings or the first records is reported before torch is loaded.
    from esmeray.inference.classify.labelled import TextStream

    space = label_space_of(model)
    config = config_of(model, overrides)
    stream = TextStream([predict.input], config.data.labels, config.model.tokenizer, config.data.ingest)
    chunks = stream.parts(CHUNK_CHARACTERS)
    first = list(islice(chunks, 1))  # without it an empty file would be found out after torch is loaded
    if not first:
        raise DataError("no records are left after applying the policies of data.ingest and data.labels")
    from esmeray.inference.classifier import ClassifierPipeline  # here: it loads torch
    from esmeray.inference.classify.prediction_table import predict_all, writing_predictions

    options = predict.model_dump(include={*ClassifierRunSection.model_fields})
    pipeline = ClassifierPipeline.load(model, data=config.data, **options)
    start_s = time.perf_counter()  # loading the model is no part of the rate
    with (
        made.file(target) as building,
        writing_predictions(building, output.name, space, config.data.labels.separator) as write,
    ):
        records, cropped, unknown = predict_all(pipeline, chain(first, chunks), write)
    publish(output)  # where it is a URI; what stands there was written to a local file so far
    seconds = time.perf_counter() - start_s
    print(
        f"{uri_of(output) or output}: {counted(records, 'prediction{s}')} in {seconds:.1f} s "
        f"({records / seconds:,.0f}/s, {pipeline.model.device}, {pipeline.model.facts.precision})"
    )
    if cropped:
        print(
            f"  {cropped:,} longer than {pipeline.max_length:,} tokens, cropped ({pipeline.crop}); "
            "--data.max_length takes more"
        )
    # The share was checked chunk by chunk.
    if unknown:
        print(f"  {pipeline.model.facts.unknown.line(unknown, 2 * unknown.total())}")
    print("\n".join(f"  {line}" for line in count_lines(stream.counts)))
