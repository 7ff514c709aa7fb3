"""Measure the time of a model by stage, and latency and memory by batch size, with advice.

MODEL is one of

- a folder, hub name or run: embeddings, or the predictions of a classifier, are measured;
- the YAML file of an experiment: it is trained for some seconds, and nothing is saved.

The limit of a stage is the device's FLOP/s (from its data sheet, or from a large product measured here), or the bytes/s
of a large copy. On the CPU, data in the cache may exceed that. The time of a batch is from texts to results on the
host. Close other programs before you measure.

Writes a folder: profile.json, report.txt, trace.json (open it at ui.perfetto.dev) and, for a model, stages.png.

Examples:
  esmeray profile model facebook/esm2_t6_8M_UR50D --data.source proteins.fasta
  esmeray profile model runs/locations --data.source held_out.fasta --profile.batch_sizes 1 32 256
  esmeray profile model train_config/esm2ae.yaml --data.source proteins.fasta
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from rich.text import Text

from esmeray.common.command_line import result_console
from esmeray.common.errors import ConfigError
from esmeray.common.progress import status_line
from esmeray.tools.grammar import OutputWriter, Overrides, command, example_of
from esmeray.train_config.section import ComputeSection, PositiveInt
from esmeray.training.config import load_config


class ModelProfileSection(ComputeSection):
    """Batches and precision of a model profile. Profiles of experiments have their own section."""

    output: str | None = None
    """Folder to create. Default: profile-MODEL in the working folder."""
    device: Literal["cpu", "cuda"] | None = None
    """Device to compute on: cpu or cuda. Default: CUDA if available."""
    batch_sizes: list[PositiveInt] = Field(default=[1, 4, 8, 16, 32, 64])
    """Batch sizes, in texts, to measure latency and memory for. none: skip this step."""


@command("profile model", __doc__, made_by="profile model")
def main(
    model: Annotated[str, Field(description="Folder, hub name, run, or the config file of an experiment.")],
    profile: ModelProfileSection,
    writer: OutputWriter,
    overrides: Overrides,
) -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # hides the start and stop messages of torch's profiler
    output = Path(profile.output or f"profile-{Path(model).stem}").absolute()
    is_experiment = model.endswith((".yaml", ".yml"))
    if not is_experiment and ("data", "source") not in overrides:
        raise ConfigError(f"missing: --data.source; {example_of(__doc__, 'profile model')}")
    with writer.folder(output) as building, status_line() as show:
        # Imported here: both load torch, and training also loads DeepSpeed.
        if is_experiment:
            from esmeray.tools.profile._training import profile_training

            show("training")
            measured = profile_training(load_config(model, overrides), building)
        else:
            from esmeray.inference.profile.measuring import profile_model
            from esmeray.model.device import choose_device

            device = profile.device or choose_device().type
            measured = profile_model(model, device, profile, profile.batch_sizes, overrides, building, show)
        lines = _write(measured, building)
    result_console().print(Text("\n".join(lines)), Text(f"written: {output}"), sep="\n")


def _write(profile: Mapping[str, Any], folder: Path) -> list[str]:
    from esmeray.inference.profile.report import draw_stages, report  # here: it loads Matplotlib

    lines = list(report(profile))
    (folder / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "profile.json").write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
    if "tokens" in profile:
        title = f"{profile['model']} on {profile['device']}, {profile['precision']}"
        draw_stages(folder / "stages.png", profile, title)
    return lines
