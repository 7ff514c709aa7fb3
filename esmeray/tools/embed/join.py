"""Join embeddings of several models by id: one vector per protein, with the channels of all models.

The folders have the same proteins, in any order. The output has the order of the first folder, and its embeddings.json
lists the channels of each. Memory holds the ids only. Read the output with esmeray.read_embeddings.

Examples:
  esmeray embed join --join.folders esm2 prot_t5 --join.output both
  esmeray embed join --join.folders esm2 esm2 --join.names mean cls --join.output mean_cls --join.format npy
"""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from esmeray.common.errors import ConfigError, did_you_mean
from esmeray.common.progress import record_bar
from esmeray.common.text import counted
from esmeray.dataset.embeddings import joining
from esmeray.dataset.embeddings.formats.registry import TABLE_FORMATS
from esmeray.dataset.embeddings.reader import open_vectors
from esmeray.tools.grammar import OutputWriter, command
from esmeray.train_config.section import Section


class JoinSection(Section):
    """Folders to join, and output folder."""

    folders: list[Path] = Field(min_length=2)
    """Folders of embeddings, at least two."""
    output: Path
    """Folder to write the results to."""
    names: list[str] = Field(default=[])
    """Output to take from each folder. Default: its first."""
    format: str | None = None
    """File format: parquet, npy or lance. Default: npy if the first folder has it, otherwise parquet."""


@command("embed join", __doc__, made_by="concat_embeddings")
def main(join: JoinSection, writer: OutputWriter) -> None:
    folders, output = join.folders, join.output
    writer.refuse_existing(output)
    # Checked here: a Literal in the schema would be a second list of formats next to the registry.
    if join.format not in (None, *TABLE_FORMATS):
        raise ConfigError(
            f"--join.format {join.format}: expected one of {', '.join(TABLE_FORMATS)}"
            f"{did_you_mean(str(join.format), TABLE_FORMATS)}"
        )
    names: Sequence[str | None] = join.names or [None] * len(folders)
    if len(names) != len(folders):
        raise ConfigError(
            f"--join.names: {len(names)} names for {len(folders)} folders; give one per folder, in the same order"
        )
    # Keyed by folder and output. This key names the columns in the manifest, so it must be unique.
    sources = {f"{source.source}/{source.name}": source for source in map(open_vectors, folders, names)}
    if len(sources) < len(folders):
        raise ConfigError("the same output of a folder is given twice; choose another with --join.names")
    first = next(iter(sources.values()))
    file_format = join.format or ("npy" if first.output.format == "npy" else "parquet")
    with record_bar("joining") as bar, writer.folder(output) as building:
        joined = joining.join(building, sources, file_format, bar)
    shape = f"{counted(len(first), 'record{s}')} with {joined.channels:,} channels"
    print(f"{output}: {shape}, {joined.dtype}, {joined.format}, {(output / joined.files[0]).stat().st_size:,} bytes")
    print("\n".join(f"  {channels:>7,}  {name}" for name, channels in joined.columns.items()))
