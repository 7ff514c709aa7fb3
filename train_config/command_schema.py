"""Settings of the commands that are no experiment's: each has a tree of sections, named after it in :data:`COMMANDS`.

An experiment's sections keep their names and meaning here.
"""

from __future__ import annotations

from pydantic import Field

from train_config.diffusion_schema import StructuresSection
from train_config.profile_schema import GpuProfileSettings, LogProfileSettings
from train_config.schema import IngestSection
from train_config.section import Section, Share


class FastaSection(Section):
    """FASTA files, and what is done with unusual records."""

    source: list[str] = Field(min_length=1)
    """FASTA files (plain, .gz, .bz2, .xz, .zst), folders or quoted globs."""
    ingest: IngestSection = IngestSection()


class ConvertSection(Section):
    """The store."""

    store: str | None = None
    """Folder to make."""


class ConvertSettings(Section):
    """From FASTA to a store."""

    convert: ConvertSection = ConvertSection()
    data: FastaSection


class StructureFilesSection(Section):
    """Structure files."""

    source: list[str] = Field(min_length=1)
    """PDB, mmCIF or BinaryCIF files, folders or quoted globs; FASTA files or stores for sequences alone."""
    validation_share: Share = 0.05
    """Share held out, without data.structures.validation_source."""
    structures: StructuresSection = StructuresSection()


class StructureStoreSection(Section):
    """The store."""

    store: str
    """Folder to make."""


class StructuresSettings(Section):
    """From structure files to a store."""

    structures: StructureStoreSection
    data: StructureFilesSection


class ExportSection(Section):
    """An export."""

    checkpoint: str = "latest"
    """latest; best: lowest validation loss; or a name such as step-00000100."""
    output: str | None = None
    """Folder to write. Default: export-CHECKPOINT in the run's folder."""


class ExportSettings(Section):
    """From a checkpoint to a Hugging Face folder."""

    export: ExportSection = ExportSection()


COMMANDS: dict[str, type[Section]] = {
    "data convert": ConvertSettings,
    "data structures": StructuresSettings,
    "train export": ExportSettings,
    "profile gpu": GpuProfileSettings,
    "profile log": LogProfileSettings,
}
"""The schema of each command, in the order of the pages."""
