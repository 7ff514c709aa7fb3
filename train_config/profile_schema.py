"""Settings of ``esmeray profile``: a section for each subcommand. Texts are those of ``data.source``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from train_config.section import NonNegativeInt, PositiveFloat, Section


class GpuProfileSection(Section):
    """Recording of this machine's GPUs."""

    log: str | None = None
    """CSV file to record to, as nvidia-smi writes it, appended to if it is there. Default: check only."""
    interval_s: Annotated[float, Field(ge=0.05)] = 1.0
    """Seconds between samples; GPUs measure no faster than every 0.05."""
    duration_s: PositiveFloat | None = None
    """Seconds after which to end. Default: at Ctrl-C."""
    gpus: list[NonNegativeInt] = Field([])
    """Numbers of the GPUs to record, as nvidia-smi shows them. Default: all."""


class LogProfileSection(Section):
    """Files made of a GPU log."""

    output: str | None = None
    """The picture, a PNG. Default: beside the log, with its name."""
    json_output: str | None = None
    """Also write the summaries to this file, as JSON."""


class GpuProfileSettings(Section):
    """A check or a recording of GPUs."""

    profile: GpuProfileSection = GpuProfileSection()


class LogProfileSettings(Section):
    """An analysis of a GPU log."""

    profile: LogProfileSection = LogProfileSection()
