"""Convert structure files to a store that training reads: sequences and backbone atoms.

Files are PDB, mmCIF or BinaryCIF, plain or .gz, known by their content; a source may be a file, a folder or a quoted
glob. The first model of each is read, atoms of highest occupancy, modified residues as what they derive from. Whatever
was changed or left out is counted; refused files are listed all at once. Of FASTA files, or a store, the predicted
structures are needed, as 'esmeray design fold' makes them. The store appears when it is complete.

Examples:
  esmeray data structures --data.source structures/ --structures.store folds_store
  esmeray data structures --data.source 'cath/*.cif.gz' --structures.store cath_store --data.structures.chains first
  esmeray data structures --data.source train/ --structures.store split_store \
--data.structures.validation_source valid/
"""

import time
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
    """Structure files."""

    source: list[str] = Field(min_length=1)
    """PDB, mmCIF or BinaryCIF files, folders or quoted globs; FASTA files or a store with data.predictions."""
    validation_share: Share = 0.05
    """Share held out, without data.structures.validation_source."""
    structures: StructuresSection = StructuresSection()
    predictions: PredictionsSection = PredictionsSection()


class StructureStoreSection(Section):
    """Folder that the store is made in."""

    store: str
    """Folder of the store to make."""


@command("data structures", __doc__)
def main(structures: StructureStoreSection, data: StructureFilesSection, overwrite: Overwrite = False) -> None:
    target = Path(structures.store)
    start_s = time.perf_counter()
    # What training would read of it; the source is given apart.
    read = DataSection(**{name: getattr(data, name) for name in ("structures", "validation_share", "predictions")})
    with conversion_bar("converting") as progress:
        made = convert_structures(data.source, target, read, progress=progress, overwrite=overwrite)
    store = StructureStore(target)
    size = f"{counted(len(store), 'record{s}')}, {counted(int(store.store.lengths.sum()), 'residue{s}')}"
    held_out = f"{store.validation.size:,} held out, in {time.perf_counter() - start_s:.1f} s"
    print("\n".join([f"{target}: {size}, {held_out}", *(f"  {line}" for line in made.counts.lines())]))
    say(next_command("train", "--config", "structdiff", "--data.source", target))
