"""Convert FASTA files to a store that training reads.

Files may be plain, .gz, .bz2, .xz or .zst; a source may be a file, a folder or a quoted glob. The store appears under
its name when it is complete; whatever was changed or left out on the way is counted.

Examples:
  python -m tools fasta2lmdb uniref50.fasta.gz uniref50_store
  python -m tools fasta2lmdb proteomes/ 'more/*.faa.zst' all_store --duplicate-ids first --bad-characters to_x
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from dataset.conversion import convert
from dataset.count_labels import count_lines
from dataset.progress import conversion_bar
from dataset.store_format import StoreManifest
from tools._arguments import ToolArguments, parse
from train_config.errors import ConfigError
from train_config.schema import IngestSection


class Arguments(ToolArguments):
    """Settings of one conversion."""

    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE [SOURCE ...] STORE")] = Field(
        description="FASTA files, folders or quoted globs, and last the folder to make."
    )
    ingest: Annotated[IngestSection, tyro.conf.arg(name="")] = IngestSection()
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace a store that exists under this name."
    )


def main(argv: list[str]) -> int:
    """Convert and say what was done."""
    arguments = parse(Arguments, argv, "fasta2lmdb", __doc__)
    if len(arguments.paths) < 2:
        raise ConfigError("give at least one source and then the store to make: fasta2lmdb SOURCE [SOURCE ...] STORE")
    *sources, target = arguments.paths
    start_s = time.perf_counter()
    with conversion_bar("converting") as progress:
        manifest = convert(sources, Path(target), arguments.ingest, progress=progress, overwrite=arguments.overwrite)
    print(_summary(target, manifest, time.perf_counter() - start_s))
    return 0


def _summary(target: str, manifest: StoreManifest, elapsed_s: float) -> str:
    rate = manifest.counts.records_read / max(elapsed_s, 1e-9)
    lines = [
        f"{target}: {manifest.num_records:,} records, {manifest.num_residues:,} residues, "
        f"{manifest.data_bytes / 1e6:,.1f} MB, in {elapsed_s:.1f} s ({rate:,.0f} records/s)"
    ]
    return "\n".join([*lines, *(f"  {line}" for line in count_lines(manifest.counts))])
