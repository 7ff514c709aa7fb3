"""Measure the time of a model by stage, and latency and memory by batch size, with advice.

MODEL is one of

- a folder, hub name or run: embeddings or predictions are measured, and the accuracy of a classifier;
- the YAML file of an experiment: it is trained for some seconds, and nothing is saved.

The limit of a stage is the device's FLOP/s (from its data sheet, or from a large product measured here), or the bytes/s
of a large copy. On the CPU, data in the cache may exceed that. The time of a batch is from texts to results on the
host. Close other programs before you measure.

Writes a folder: profile.json, report.txt, trace.json (open it at ui.perfetto.dev), stacks.txt (for a flame graph) and
stages.png; with batch sizes also batches.csv, batches.png and heatmap.png.

Examples:
  esmeray profile model facebook/esm2_t6_8M_UR50D --data.source proteins.fasta
  esmeray profile model runs/locations --data.source held_out.fasta --profile.batch_sizes 1 32 256
  esmeray profile model train_config/esm2ae.yaml --data.source proteins.fasta
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from rich.text import Text

from esmeray.common.command_line import result_console
from esmeray.common.errors import ConfigError
from esmeray.common.progress import status_line
from esmeray.inference.profile.section import ModelProfileSection
from esmeray.tools.grammar import OutputWriter, Overrides, command, example_of
from esmeray.training.config import load_config


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

            measured = profile_model(model, profile, overrides, building, show)
        lines = _write(measured, building)
    result_console().print(Text("\n".join(lines)), Text(f"written: {output}"), sep="\n")


def _write(profile: Mapping[str, Any], folder: Path) -> list[str]:
    import pandas as pd  # imported here: it takes a moment

    from esmeray.inference.profile.report import draw_batches, draw_heatmap, draw_stages, report

    lines = list(report(profile))
    (folder / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "profile.json").write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
    title = f"{profile['model']} on {profile['device']}, {profile['precision']}"
    if "tokens" in profile:
        draw_stages(folder / "stages.png", profile, title)
    if "batch_sizes" in profile:
        measured = profile["batch_sizes"]
        draw_batches(folder / "batches.png", measured, title)
        draw_heatmap(folder / "heatmap.png", measured, title)
        names = ["batch_size", "run", "sequences", "batch_tokens", "ms", "ms_per_sample", "error"]
        rows: list[dict[str, Any]] = []
        for row in measured["rows"]:
            if row["error"]:  # out of memory: the row names the first batch size that failed
                rows.append({"batch_size": row["batch_size"], "error": row["error"]})
            size = row["batch_size"]
            rows += [{"batch_size": size, "run": number, **run} for number, run in enumerate(row["runs"], 1)]
        # dtype object keeps integers as integers in columns with missing values.
        pd.DataFrame(rows, columns=names, dtype=object).to_csv(folder / "batches.csv", index=False, lineterminator="\n")
    return lines
