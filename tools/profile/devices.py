"""Compare the CPU with the GPU on embeddings of the same proteins.

Each model embeds the same proteins, spread over the lengths of the input, on both devices in turns, each with the
precision and token budget that embed takes there. A table gives proteins/s and residues/s, the speed-up with its range
over the rounds, the hours that the GPU saves per 1,000,000 proteins, and how well the vectors agree. Without a GPU, the
CPU's fp32 and bf16 are compared. Sequences that are too long for a model are cropped.

A folder is written: benchmark_cpu_gpu.json, with every round, and benchmark_cpu_gpu.png. Close what else uses the
machine.

Examples:
  esmeray profile devices --models facebook/esm2_t6_8M_UR50D facebook/esm2_t12_35M_UR50D \
--input proteins.fasta --output cpu_gpu
  esmeray profile devices --models esm2_t33_650M --random-weights --input proteins.store --output cpu_gpu
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import Field
from rich.table import Table

from common.arguments import parse
from common.command_line import result_console
from common.progress import status_line
from common.publishing import made_folder
from dataset.store.conversion import open_store
from inference.embedding.request import InputArguments
from train_config.embed_schema import EmbedSection
from train_config.section import Precision

MADE_BY = "benchmark_cpu_gpu"


class Arguments(InputArguments):
    """Models and length of the measurement."""

    models: list[str] = Field(min_length=1, description="Folders, hub names or runs.")
    proteins: int = Field(200, gt=0, description="Distinct sequences to embed.")
    rounds: int = Field(3, gt=0, description="Measurements of each device.")
    precision: Precision | None = Field(None, description="Of both devices, where there is a GPU. Default: as embed.")


def main(argv: list[str]) -> int:
    """Measure, write, and print a table."""
    arguments = parse(Arguments, argv, "profile devices", __doc__)
    settings = EmbedSection(precision=arguments.precision, long="crop")
    with made_folder(arguments.output.absolute(), MADE_BY, arguments.overwrite) as building:
        import torch  # here: it takes seconds

        from inference.device_comparison import compare_devices, draw_comparison

        console = result_console()
        if not torch.cuda.is_available():
            console.print("no GPU is seen: the CPU's fp32 and bf16 are compared")
        options = arguments.model_dump(include={"proteins", "rounds", "random_weights"})
        with tempfile.TemporaryDirectory() as scratch, status_line() as show:
            store = open_store(arguments.input, arguments.ingest, Path(scratch))
            found = [compare_devices(model, store, settings, show, **options) for model in arguments.models]
        machine = {"threads": torch.get_num_threads(), "torch": torch.__version__}
        report = json.dumps({"machine": machine, "models": found}, indent=1)
        (building / f"{MADE_BY}.json").write_text(report + "\n", encoding="utf-8")
        draw_comparison(building / f"{MADE_BY}.png", found)
    console.print(_table(found))
    console.print(f"written: {arguments.output}", markup=False)
    return 0


def _table(models: list[dict[str, Any]]) -> Table:
    shown = Table(box=None, padding=(0, 2, 0, 0))
    for column in (
        "model",
        "device",
        "proteins/s",
        "residues/s",
        "speed-up",
        "saved per 1M",
        "lowest cosine",
        "difference",
    ):
        shown.add_column(column, justify="left" if column in ("model", "device") else "right")
    for model in models:
        speed_up = "{value:.2f} ({low:.2f} to {high:.2f})".format(**model["speed_up"])
        saved = f"{model['hours_saved_per_million_proteins']:,.3g} h"
        agreement = "{lowest_cosine:.5f}", "{largest_relative_difference:.1e}"
        of_both = [speed_up, saved, *(text.format(**model["agreement"]) for text in agreement)]
        for name, device in model["devices"].items():
            rates = [f"{median(device[f'{unit}_per_s']):,.1f}" for unit in ("proteins", "residues")]
            shown.add_row(model["model"], name, *rates, *of_both)
            of_both = []
    return shown
