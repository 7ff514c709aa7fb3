"""Convert structure files to a store that training reads: sequences and backbone atoms.

Files are PDB, mmCIF or BinaryCIF, plain or .gz, recognized by their content. A source is a file, a folder or a quoted
glob. The first model of each file is read, with the atoms of highest occupancy. Modified residues become the residues
that they derive from. Changes and omissions are counted; refused files are reported together. FASTA files or a store
need predicted structures, as made by 'esmeray design fold'. The store appears when it is complete.

Examples:
  esmeray data structures --data.source structures/ --structures.store folds_store
  esmeray data structures --data.source 'cath/*.cif.gz' --structures.store cath_store --data.structures.chains first
  esmeray data structures --data.source train/ --structures.store split_store \
--data.structures.validation_source valid/
"""

from pathlib import Path

from pydantic import Field

from esmeray.common.command_line import next_command, say
from esmeray.common.progress import conversion_bar
from esmeray.common.text import counted
from esmeray.dataset.section import DataSection, PredictionsSection, StructuresSection
from esmeray.dataset.structures.conversion import convert_structures
from esmeray.dataset.structures.store import StructureStore
from esmeray.tools.grammar import Overwrite, command
from esmeray.train_config.section import Section, Share


class StructureFilesSection(Section):
    """Structure files, and how they are read."""

    source: list[str] = Field(min_length=1)
    """PDB, mmCIF or BinaryCIF files, folders or quoted globs; FASTA files or a store with data.predictions."""
    validation_share: Share = 0.05
    """Share held out for validation, unless data.structures.validation_source is set."""
    structures: StructuresSection = StructuresSection()
    predictions: PredictionsSection = PredictionsSection()


class StructureStoreSection(Section):
    """Folder of the store."""

    store: str
    """Folder to write the store to."""


@command("data structures", __doc__)
def main(structures: StructureStoreSection, data: StructureFilesSection, overwrite: Overwrite = False) -> None:
    target = Path(structures.store)
    # The settings that training would use; the source is passed separately.
    read = DataSection(**{name: getattr(data, name) for name in ("structures", "validation_share", "predictions")})
    with conversion_bar("converting") as progress:
        made = convert_structures(data.source, target, read, progress=progress, overwrite=overwrite)
    store = StructureStore(target)
    size = f"{counted(len(store), 'record{s}')}, {counted(int(store.store.lengths.sum()), 'residue{s}')}"
    held_out = f"{store.validation.size:,} held out"
    print("\n".join([f"{target}: {size}, {held_out}", *(f"  {line}" for line in made.counts.lines())]))
    say(next_command("train", "--config", "structdiff", "--data.source", target))
