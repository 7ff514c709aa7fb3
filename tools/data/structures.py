"""Convert structure files to a store that training reads: sequences and backbone atoms.

Files are PDB, mmCIF or BinaryCIF, plain or .gz, known by their content; a source may be a file, a folder or a quoted
glob. The first model of each is read, atoms of highest occupancy, modified residues as what they derive from. Whatever
was changed or left out is counted; refused files are listed all at once. FASTA files, or a store, give sequences
without structures. The store appears when it is complete.

Examples:
  esmeray data structures structures/ folds_store
  esmeray data structures 'cath/*.cif.gz' cath_store --chains first --min-residues 40
  esmeray data structures train/ split_store --validation-source valid/
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
from dataset.structures.conversion import convert_structures
from dataset.structures.store import StructureStore
from train_config.diffusion_schema import StructuresSection
from train_config.schema import DataSection


class Arguments(ToolArguments):
    """Settings of one conversion."""

    paths: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE [SOURCE ...] STORE")] = Field(
        description="Structure files, folders or quoted globs, and last the folder to make."
    )
    structures: Annotated[StructuresSection, tyro.conf.arg(name="")] = StructuresSection()
    validation_share: float = Field(0.05, ge=0, lt=1, description="Held out, without --validation-source.")
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace a store that exists under this name."
    )


def main(argv: list[str]) -> int:
    """Convert, and say what was done."""
    arguments = parse(Arguments, argv, "data structures", __doc__)
    if len(arguments.paths) < 2:
        raise ConfigError("give at least one source and then the store: esmeray data structures SOURCE ... STORE")
    *sources, target = arguments.paths
    start_s = time.perf_counter()
    data = DataSection(structures=arguments.structures, validation_share=arguments.validation_share)
    with conversion_bar("converting") as progress:
        made = convert_structures(sources, Path(target), data, progress=progress, overwrite=arguments.overwrite)
    store = StructureStore(target)
    size = f"{counted(len(store), 'record{s}')}, {counted(int(store.store.lengths.sum()), 'residue{s}')}"
    held_out = f"{store.validation.size:,} held out, in {time.perf_counter() - start_s:.1f} s"
    print(f"{target}: {size}, {held_out}")
    for line in made.counts.lines():
        print(f"  {line}")
    return 0
