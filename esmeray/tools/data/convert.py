"""Convert FASTA files to a store that training reads.

Files may be plain, .gz, .bz2, .xz or .zst. A source is a file, a folder or a quoted glob. The store appears under its
name when it is complete. Changed and left-out records are counted. Refused records are reported together, the first ten
with file and line; --check only does that.

Examples:
  esmeray data convert --data.source uniref50.fasta.gz --convert.store uniref50_store
  esmeray data convert --data.source uniref50.fasta.gz --check
  esmeray data convert --data.source proteomes/ 'more/*.faa.zst' --convert.store all_store \
--data.ingest.duplicate_ids first --data.ingest.bad_characters to_x
"""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from esmeray.common.command_line import next_command, say
from esmeray.common.errors import ConfigError
from esmeray.common.progress import conversion_bar
from esmeray.common.text import counted
from esmeray.dataset.fasta.counts import IngestCounts, count_lines
from esmeray.dataset.store import conversion
from esmeray.tools.grammar import IngestedSection, Overwrite, command, example_of
from esmeray.train_config.section import Section


class FastaSection(IngestedSection):
    """FASTA files, and policies for unusual records."""

    source: list[str] = Field(min_length=1)
    """FASTA files (plain, .gz, .bz2, .xz, .zst), folders or quoted globs."""


class ConvertSection(Section):
    """Folder of the store."""

    store: str | None = None
    """Folder to write the store to."""


@command("data convert", __doc__)
def main(
    convert: ConvertSection,
    data: FastaSection,
    check: Annotated[
        bool, Field(description="Check all records and report errors and changes, without writing anything.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    sources, ingest, target = data.source, data.ingest, convert.store
    if check:  # needs no store, which is why convert.store is optional
        with conversion_bar("checking") as progress:
            checked = conversion.check(sources, ingest, progress=progress)
        _print_summary(f"{', '.join(sources)}: valid, {_holds(checked.records, checked.residues)}", checked.counts)
        return
    if target is None:
        raise ConfigError(f"missing: --convert.store; {example_of(__doc__, 'data convert')}")
    with conversion_bar("converting") as progress:
        manifest = conversion.convert(sources, Path(target), ingest, progress=progress, overwrite=overwrite)
    size = f"{manifest.data_bytes / 1e6:,.1f} MB"
    _print_summary(f"{target}: {_holds(manifest.num_records, manifest.num_residues)}, {size}", manifest.counts)
    say(next_command("train", "--config", "masked_lm", "--data.source", target))


def _holds(records: int, residues: int) -> str:
    return f"{counted(records, 'record{s}')}, {counted(residues, 'residue{s}')}"


def _print_summary(first: str, counts: IngestCounts) -> None:
    print("\n".join([first, *(f"  {line}" for line in count_lines(counts))]))
