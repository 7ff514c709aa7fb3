"""A trained model and structures as the commands of design name them."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from esmeray.common.errors import ConfigError
from esmeray.dataset.section import CaOnly, StructuresSection
from esmeray.dataset.structures.conversion import check_ids, find_structure_files, read_files
from esmeray.dataset.structures.store import Structure, StructureCounts
from esmeray.inference.models.source import exported_by
from esmeray.train_config.section import DEFAULT_TOKENS, PositiveInt, Section

if TYPE_CHECKING:
    from esmeray.tasks.diffusion.model import SequenceDiffusion


class DesignModelSection(Section):
    """Settings with which a model of sequence diffusion runs."""

    label: str | None = None
    """Class that designs are conditioned on."""
    device: str | None = None
    """Device that computes, cpu or cuda. Default: CUDA where there is one."""
    tokens: PositiveInt = DEFAULT_TOKENS
    """Token budget of a batch."""


class DesignStructuresSection(DesignModelSection):
    """Structures, and how the model runs."""

    structures: list[str] = Field(default=[])
    """Structure files, folders or globs."""
    chains: str = "each"
    """Chains to take of each file: each, first, complex (all as one), or names, as A,B."""
    ca_only: CaOnly = "error"
    """Chains of CA atoms alone: refuse, leave out or complete them."""


TASK = "diffusion"


def exported_design(source: Path) -> Path:
    """The folder of the model of sequence diffusion that a command means; raises ConfigError for another one."""
    return exported_by(TASK, source)


def structures_of(options: DesignStructuresSection) -> list[Structure]:
    """Chains of the structure files; what was changed or left out is said. Raises DataError for a file or id that is
    refused."""
    # From one residue on, as the user has named the file: the rules of training are for folders full of them.
    # Designs depend on coordinates and not on confidences.
    section = StructuresSection(chains=options.chains, min_residues=1, ca_only=options.ca_only, predicted=False)
    counts = StructureCounts()
    structures = read_files(find_structure_files(options.structures), section, counts)
    check_ids(structures)
    for line in counts.lines():
        print(line, file=sys.stderr)
    return structures


def load_model(source: Path, options: DesignModelSection) -> "tuple[SequenceDiffusion, int]":
    """The model on its device, and the number of the label.

    Raises ConfigError for an unknown label, or where there is no such device.
    """
    from esmeray.dataset.packed_batch import NO_LABEL
    from esmeray.inference.models.opening import open_model

    model: Any = open_model(exported_design(source), device=options.device, heads=[TASK]).heads[TASK]
    if options.label is not None and options.label not in model.labels:
        known = ", ".join(model.labels) or "none"
        raise ConfigError(f"label {options.label}: the model knows {known}")
    return model, NO_LABEL if options.label is None else model.labels.index(options.label)
