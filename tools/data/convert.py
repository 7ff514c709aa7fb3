"""Convert FASTA files to a store that training reads.

Files may be plain, .gz, .bz2, .xz or .zst; a source may be a file, a folder or a quoted glob. The store appears under
its name when it is complete; whatever was changed or left out on the way is counted. Refused records are listed all at
once, the first ten with their places; --check does only that.

Examples:
  esmeray data convert uniref50.fasta.gz uniref50_store
  esmeray data convert --check uniref50.fasta.gz
  esmeray data convert proteomes/ 'more/*.faa.zst' all_store --duplicate-ids first --bad-characters to_x
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from common.arguments import ToolArguments, parse
from common.errors import ConfigError
from common.progress import conversion_bar
from common.text import counted
from dataset.fasta.counts import IngestCounts, count_lines
from dataset.store.conversion import check, convert
from train_config.schema import IngestSection


class Arguments(ToolArguments):
    """Settings of one conversion."""

    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE [SOURCE ...] STORE")] = Field(
        description="FASTA files, folders or quoted globs, and last the folder to make (with --check there is none)."
    )
    ingest: Annotated[IngestSection, tyro.conf.arg(name="")] = IngestSection()
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace a store that exists under this name."
    )
    check: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Read everything and report what would be refused or changed; write nothing."
    )


def main(argv: list[str]) -> int:
    """Convert or check, and say what was done."""
    arguments = parse(Arguments, argv, "data convert", __doc__)
    if len(arguments.paths) < (1 if arguments.check else 2):
        raise ConfigError(
            "give at least one source and then the store to make: esmeray data convert SOURCE [SOURCE ...] STORE, or "
            "sources alone to be checked: esmeray data convert --check SOURCE [SOURCE ...]"
        )
    if arguments.check:
        return _check(list(arguments.paths), arguments.ingest)
    *sources, target = arguments.paths
    start_s = time.perf_counter()
    with conversion_bar("converting") as progress:
        manifest = convert(sources, Path(target), arguments.ingest, progress=progress, overwrite=arguments.overwrite)
    elapsed_s = time.perf_counter() - start_s
    rate = manifest.counts.records_read / max(elapsed_s, 1e-9)
    size = f"{manifest.data_bytes / 1e6:,.1f} MB, in {elapsed_s:.1f} s ({rate:,.0f} records/s)"
    _print_summary(f"{target}: {_holds(manifest.num_records, manifest.num_residues)}, {size}", manifest.counts)
    return 0


def _check(sources: list[str], ingest: IngestSection) -> int:
    with conversion_bar("checking") as progress:
        checked = check(sources, ingest, progress=progress)
    _print_summary(f"{', '.join(sources)}: sound, {_holds(checked.records, checked.residues)}", checked.counts)
    return 0


def _holds(records: int, residues: int) -> str:
    return f"{counted(records, 'record{s}')}, {counted(residues, 'residue{s}')}"


def _print_summary(first: str, counts: IngestCounts) -> None:
    print("\n".join([first, *(f"  {line}" for line in count_lines(counts))]))
