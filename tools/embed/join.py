"""Join embeddings of several models: one vector a protein of the sum of channels, by id.

The folders are of the same proteins, in any order; the output is in the order of the first, and its embeddings.json has
the channels of each. Memory is that of the ids. Read it with dataset.embeddings.reader.open_embeddings.

Examples:
  esmeray embed join esm2 prot_t5 --output both
  esmeray embed join esm2 esm2 --names mean cls --output mean_cls --format npy
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from common.arguments import ToolArguments, parse
from common.errors import ConfigError
from common.progress import record_bar
from common.publishing import made_folder, refuse_existing
from common.text import counted
from dataset.embeddings.formats.registry import TableFormat
from dataset.embeddings.joining import join
from dataset.embeddings.reader import open_vectors

MADE_BY = "concat_embeddings"


class Arguments(ToolArguments):
    """Folders to join, and the folder to make."""

    folders: Annotated[list[Path], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER FOLDER ...")] = Field(
        description="Folders of embeddings, at least two."
    )
    output: Path = Field(description="Folder to make.")
    names: list[str] = Field([], description="Output to take of each folder. Default: its first.")
    format: TableFormat | None = Field(None, description="Default: npy where the first folder has it.")
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace the folder if this tool made it and nobody changed it since."
    )


def main(argv: list[str]) -> int:
    """Open, join, and report."""
    arguments = parse(Arguments, argv, "embed join", __doc__)
    folders, output = arguments.folders, arguments.output
    refuse_existing(output, MADE_BY, arguments.overwrite)
    if len(folders) < 2:
        raise ConfigError("give at least two folders to join: esmeray embed join FOLDER FOLDER ... --output FOLDER")
    names = arguments.names or [None] * len(folders)
    if len(names) != len(folders):
        raise ConfigError(f"--names: {len(names)} for {len(folders)} folders; give one for each, in their order")
    opened = map(open_vectors, folders, names)
    sources = {f"{source.folder}/{source.name}": source for source in opened}
    if len(sources) < len(folders):
        raise ConfigError("the same output of a folder is given twice; choose another by --names")
    of_first = next(iter(sources.values())).output.format
    file_format = arguments.format or ("npy" if of_first == "npy" else "parquet")
    with record_bar("joining") as bar, made_folder(output.absolute(), MADE_BY, arguments.overwrite) as building:
        joined = join(building, sources, file_format, bar)
    records = counted(len(next(iter(sources.values()))), "record{s}")
    size = (output / joined.files[0]).stat().st_size
    print(f"{output}: {records} of {joined.channels:,} channels, {joined.dtype}, {joined.format}, {size:,} bytes")
    print("\n".join(f"  {channels:>7,}  {name}" for name, channels in joined.columns.items()))
    return 0
