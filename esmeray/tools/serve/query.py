"""Get embeddings or classes of FASTA files from the service, on a machine without torch and Ray.

The ending of the output selects the answers. Parquet has embeddings: id, and the values of --query.task. TSV has the
classes of a classifier: id, label, and a column with the probability of each class, named after the class.

Several requests are sent at once. Requests that the service refuses because of overload are sent again.

Examples:
  esmeray serve query --query.input proteins.fasta --query.output vectors.parquet \
--query.address http://gpu-box:8000 --query.key_file key.txt
  esmeray serve query --query.input proteins.fasta --query.output residues.parquet --query.task residues
  esmeray serve query --query.input proteins.fasta --query.output classes.tsv --query.model locations
"""

import csv
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from esmeray.common.errors import ConfigError, reading
from esmeray.common.progress import record_bar
from esmeray.common.text import counted
from esmeray.dataset.fasta.reader import FastaSource
from esmeray.service.client import Client, checked_key
from esmeray.service.section import QuerySection
from esmeray.tools.grammar import OutputWriter, command

ROWS = 1024
"""Rows per row group of the Parquet file."""


@command("serve query", __doc__, made_by="query")
def main(query: QuerySection, writer: OutputWriter) -> None:
    write = WRITERS.get(query.output.suffix)
    if write is None:
        raise ConfigError(f"--query.output {query.output}: must end in {' or '.join(WRITERS)}")
    if write is _write_classes and query.task not in ("classify", QuerySection.model_fields["task"].default):
        raise ConfigError(f"--query.task {query.task}: its answers are arrays; let --query.output end in .parquet")
    writer.refuse_file(query.output)
    source = FastaSource(query.input)
    client = Client(query.address, key=_key(query.key_file), model=query.model)
    # The input is read only as far ahead as the client has requests, so that memory holds neither input nor answers.
    with (
        client,
        writer.file(query.output) as building,
        record_bar("asking") as bar,
    ):
        number = write(building, client, _records(source, bar), query.task)
    print(f"{query.output}: {counted(number, 'protein{s}')}")


def _key(file: Path | None) -> str | None:
    """Key from the file, otherwise from the environment variable ESMERAY_KEY."""
    if file is None:
        key = os.environ.get("ESMERAY_KEY")
        return checked_key(key, "ESMERAY_KEY") if key else None
    with reading(file):  # a file that is not text becomes an invalid key, which is refused
        return checked_key(file.read_bytes().decode("ascii", "replace").strip(), f"--query.key_file {file}")


def _records(source: FastaSource, bar: Callable[[float, int], None]) -> Iterator[tuple[str, str]]:
    number = 0
    for batch in source.batches():
        for record_id, sequence in zip(batch.records.ids.split(), batch.records.sequences, strict=True):
            yield record_id.decode("ascii"), sequence.decode("ascii")
            number += 1
            bar(source.bytes_read / max(1, source.bytes_total), number)


def _write_arrays(path: Path, client: Client, records: Iterator[tuple[str, str]], output: str) -> int:
    """Write a row group per 1,024 records. Returns the number of records."""
    answers = client.stream(records, output)
    writer = None  # created with the first answers, which give the number of channels
    number = 0
    while rows := list(islice(answers, ROWS)):
        table = pa.table({"id": [name for name, _ in rows], "embedding": [array.tolist() for _, array in rows]})
        kind = pa.list_(pa.float32(), rows[0][1].shape[-1])
        column = kind if rows[0][1].ndim == 1 else pa.list_(kind)
        table = table.cast(pa.schema([("id", pa.string()), ("embedding", column)]))
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
        number += len(rows)
    if writer is not None:
        writer.close()
    return number


def _write_classes(path: Path, client: Client, records: Iterator[tuple[str, str]], _: str) -> int:
    """Write a line per record. Returns the number of records."""
    number = 0
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, delimiter="\t", lineterminator="\n")
        for number, row in enumerate(client.classify(records), 1):
            label, values = row.get("label", ""), row["probabilities"]
            text = ";".join(label) if isinstance(label, list) else label
            # Per residue, the label is a string with a letter for each residue; probabilities are left out.
            classes = [] if isinstance(values[0], list) else row["labels"]
            if number == 1:
                # A class may be named id or label.
                taken = {"id": "probabilities_id", "label": "probabilities_label"}
                table.writerow(["id", "label", *(taken.get(name, name) for name in classes)])
            table.writerow([row["id"], text, *(f"{value:.6g}" for value in values[: len(classes)])])
    return number


WRITERS = {".parquet": _write_arrays, ".tsv": _write_classes}
"""Function that requests the answers and writes them, by the ending of the output."""
