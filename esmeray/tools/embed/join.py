"""Join embeddings of several models: one vector a protein of the sum of channels, by id.

The folders are of the same proteins, in any order; the output is in the order of the first, and its embeddings.json has
the channels of each. Memory is that of the ids. Read it with esmeray.read_embeddings.

Examples:
  esmeray embed join --join.folders esm2 prot_t5 --join.output both
  esmeray embed join --join.folders esm2 esm2 --join.names mean cls --join.output mean_cls --join.format npy
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from esmeray.common.errors import ConfigError
from esmeray.common.progress import record_bar
from esmeray.common.text import counted, did_you_mean
from esmeray.dataset.embeddings import joining
from esmeray.dataset.embeddings.formats.registry import TABLE_FORMATS
from esmeray.dataset.embeddings.reader import open_vectors
from esmeray.tools.grammar import Made, command
from esmeray.train_config.section import Section


class JoinSection(Section):
    """Folders to join, and the folder to make."""

    folders: list[Path] = Field(min_length=2)
    """Folders of embeddings, at least two."""
    output: Path
    """Folder to make for the results."""
    names: list[str] = Field(default=[])
    """Output to take of each folder. Default: its first."""
    format: str | None = None
    """Format of the files, parquet, npy or lance. Default: npy where the first folder has it."""


@command("embed join", __doc__, made_by="concat_embeddings")
def main(join: JoinSection, made: Made) -> None:
    folders, output = join.folders, join.output
    made.refuse_existing(output)
    # A literal in the schema would be a second list of the formats that there are.
    if join.format not in (None, *TABLE_FORMATS):
        raise ConfigError(
            f"--join.format {join.format}: expected one of {', '.join(TABLE_FORMATS)}"
            f"{did_you_mean(str(join.format), TABLE_FORMATS)}"
        )
    names: Sequence[str | None] = join.names or [None] * len(folders)
    if len(names) != len(folders):
        raise ConfigError(f"--join.names: {len(names)} for {len(folders)} folders; give one for each, in their order")
    # By folder and output: the name of the columns in the manifest, which must be unique.
    sources = {f"{source.source}/{source.name}": source for source in map(open_vectors, folders, names)}
    if len(sources) < len(folders):
        raise ConfigError("the same output of a folder is given twice; choose another by --join.names")
    first = next(iter(sources.values()))
    file_format = join.format or ("npy" if first.output.format == "npy" else "parquet")
    with record_bar("joining") as bar, made.folder(output) as building:
        joined = joining.join(building, sources, file_format, bar)
    shape = f"{counted(len(first), 'record{s}')} of {joined.channels:,} channels"
    print(f"{output}: {shape}, {joined.dtype}, {joined.format}, {(output / joined.files[0]).stat().st_size:,} bytes")
    print("\n".join(f"  {channels:>7,}  {name}" for name, channels in joined.columns.items()))
