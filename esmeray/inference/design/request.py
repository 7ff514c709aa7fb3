"""Model and structure settings of the design commands."""

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
    """Settings to run a sequence diffusion model."""

    label: str | None = None
    """Class to condition designs on."""
    device: str | None = None
    """Device to compute on: cpu or cuda. Default: CUDA if available."""
    tokens: PositiveInt = DEFAULT_TOKENS
    """Token budget of a batch."""


class DesignStructuresSection(DesignModelSection):
    """Settings for structures and the model."""

    structures: list[str] = Field(default=[])
    """Structure files, folders or globs."""
    chains: str = "each"
    """Chains to read from each file: each, first, complex (all as one), or names, e.g. A,B."""
    ca_only: CaOnly = "error"
    """Handling of chains with CA atoms only: error, skip or complete."""


TASK = "diffusion"


def exported_design(source: Path) -> Path:
    """Folder of the sequence diffusion model that ``source`` names. Raises ConfigError for any other model."""
    return exported_by(TASK, source)


def structures_of(options: DesignStructuresSection) -> list[Structure]:
    """Read the chains of the structure files and print which residues were changed or left out.

    Raises DataError for an invalid file or id.
    """
    # min_residues is 1, because the user named these files; training's minimum is meant for large collections.
    # `predicted` is false, because designs depend on coordinates only.
    section = StructuresSection(chains=options.chains, min_residues=1, ca_only=options.ca_only, predicted=False)
    counts = StructureCounts()
    structures = read_files(find_structure_files(options.structures), section, counts)
    check_ids(structures)
    for line in counts.lines():
        print(line, file=sys.stderr)
    return structures


def load_model(source: Path, options: DesignModelSection) -> "tuple[SequenceDiffusion, int]":
    """Load the model onto its device and look up the label's number.

    Raises ConfigError for an unknown label or an unavailable device.
    """
    from esmeray.dataset.packed_batch import NO_LABEL
    from esmeray.inference.models.opening import open_model

    model: Any = open_model(exported_design(source), device=options.device, heads=[TASK]).heads[TASK]
    if options.label is not None and options.label not in model.labels:
        known = ", ".join(model.labels) or "none"
        raise ConfigError(f"label {options.label}: the model's labels are {known}")
    return model, NO_LABEL if options.label is None else model.labels.index(options.label)
