"""Profile the embedding of proteins by stage, and say what limits it.

A few batches, of proteins spread over the lengths of the input, are computed and written under torch.profiler as embed
does it; embed's options mean the same. A table gives the time of each stage, its share, and how much of its limit it
reaches: for products and attention the device's FLOP/s (of its data sheet, or of a large product measured here), for
the others the bytes/s of a large copy; on the CPU, what stays in the cache may exceed that. Then comes advice.

A folder is written: profile.json, trace.json (open it at ui.perfetto.dev) and stacks.txt (for a flame graph).

Examples:
  esmeray profile model --model facebook/esm2_t6_8M_UR50D --input proteins.fasta --output profile
  esmeray profile model --model esm2_t33_650M --random-weights --input proteins.store --output profile \
--batches 20 --tokens 4096 --outputs mean residues
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from rich.table import Table

from common.arguments import parse
from common.command_line import result_console
from common.progress import status_line
from common.publishing import made_folder
from inference.embedding.request import InputArguments, JobRequest
from train_config.embed_schema import EmbedSection

MADE_BY = "profile_embeddings"


class SampleArguments(InputArguments):
    """Model, device and length of the profile."""

    model: str = Field(description="Folder, hub name or run.")
    batches: int = Field(10, gt=0, description="Batches to profile, about; fewer where the input has no more.")
    device: Literal["cpu", "cuda"] | None = Field(None, description="Default: CUDA where there is one.")


class Arguments(EmbedSection, SampleArguments):
    """Arguments of the command."""


def main(argv: list[str]) -> int:
    """Profile, write, and print the table and the advice."""
    arguments = parse(Arguments, argv, "profile model", __doc__)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # above those of torch's profiler, which reports start and stop
    settings = EmbedSection(**{name: getattr(arguments, name) for name in EmbedSection.model_fields})
    request = JobRequest([arguments.model], arguments.input, arguments.output, settings, arguments.ingest)
    with made_folder(arguments.output.absolute(), MADE_BY, arguments.overwrite) as building:
        profile = _profiled(replace(request, device=arguments.device), arguments, building)
        (building / "profile.json").write_text(json.dumps(profile, indent=1) + "\n", encoding="utf-8")
    peaks, console = profile["peaks"], result_console()
    console.print(
        f"{profile['residues'] / profile['seconds']:,.0f} residues/s on {profile['device']} in {profile['precision']}; "
        f"peaks: {peaks['flops_per_s'] / 1e12:,.3g} TFLOP/s ({peaks['flops_from']}), "
        f"{peaks['bytes_per_s'] / 1e9:,.3g} GB/s (measured copy)"
    )
    console.print(_table(profile))
    for line in profile["advice"] or ["Nothing else limits it than the device: use a faster one or a smaller model"]:
        console.print(line, markup=False)
    console.print(f"written: {arguments.output}", markup=False)
    return 0


def _profiled(request: JobRequest, arguments: Arguments, folder: Path) -> dict[str, Any]:
    # Here: they load torch.
    from dataset.store.conversion import open_store
    from inference.embedding.job import resolved
    from inference.embedding.plan import make_plan
    from inference.embedding.worker import open_worker
    from inference.embedding_profile import profile_shard

    request = resolved(request)
    with tempfile.TemporaryDirectory() as scratch, status_line() as show:
        store = open_store(request.sources, request.ingest, Path(scratch))
        show(f"profiling {arguments.model}")
        device = request.device or "cpu"
        worker = open_worker(arguments.model, request.settings, device, store, arguments.random_weights)
        plan = make_plan(store, request.settings, worker.facts.longest)
        tokens_each = plan.tokens(range(plan.num_shards)) / plan.num_sequences
        shard = plan.spread(round(arguments.batches * plan.budget / tokens_each) or 1)
        return profile_shard(worker, shard, folder, Path(scratch) / "shard")


def _table(profile: dict[str, Any]) -> Table:
    shown = Table("stage", box=None, padding=(0, 2, 0, 0))
    for column in ("ms a batch", "share", "of its limit"):
        shown.add_column(column, justify="right")
    for name, stage in profile["stages"].items():
        limit = "" if stage["share_of_limit"] is None else f"{stage['share_of_limit']:.0%}"
        shown.add_row(name, f"{1e3 * stage['seconds'] / profile['batches']:,.3f}", f"{stage['share']:.1%}", limit)
    return shown
