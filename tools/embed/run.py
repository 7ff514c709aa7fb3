"""Compute embeddings of every protein of FASTA files or a store, once, on every device, to files.

A model is a folder or a hub name of transformers (ESM-2, ESM C, ProtBERT, Ankh, ProtT5), an Esmeray run, or its export.
Equal sequences are computed once. The folder appears when it is complete: Parquet, .npy or HDF5 of vectors of proteins,
in the order of the input; safetensors of vectors of residues. Until then everything lies in OUTPUT.partial, where the
same command resumes. Read it with dataset.embeddings.reader.open_embeddings.

Without a cluster this process computes; where there are several GPUs, or --address or RAY_ADDRESS names a Ray cluster,
an actor on each device does. --dry-run reports sequences, duplicates, bytes and time, and writes nothing.

Examples:
  esmeray embed --model facebook/esm2_t33_650M_UR50D --input proteome.fasta.gz --output embeddings
  esmeray embed --model runs/esm2ae --input proteins.store --output latents --outputs latents --dtype fp16
  esmeray embed --models facebook/esm2_t6_8M_UR50D Rostlab/prot_bert --input 'faa/*.faa' --output both --dry-run
  esmeray embed --model my-esm2 --input all.fasta --output residues --outputs residues mean --long window \
--max-length 1022
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from pydantic import Field

from cluster.placement import LOCAL, find, local_resources
from common.arguments import parse
from common.command_line import result_console
from common.errors import ConfigError
from common.publishing import refuse_existing
from common.text import counted, duration
from inference.embedding.request import InputArguments, JobRequest
from train_config.embed_schema import EmbedSection
from train_config.schema import RaySection

if TYPE_CHECKING:
    from inference.embedding.estimate import Estimate

MADE_BY = "embed"


class JobArguments(InputArguments):
    """Models and devices."""

    model: str | None = Field(None, description="Folder, hub name or run.")
    models: list[str] = Field([], description="Several models over one plan, each to a folder in OUTPUT.")
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Report sequences, bytes and time after a measurement; write nothing."
    )
    device: Literal["cpu", "cuda"] | None = Field(None, description="Default: CUDA where there is one.")
    cache: Path | None = Field(
        None, description="Folder of values that jobs share, and classifiers of frozen backbones. Default: none."
    )
    cache_gb: float = Field(20.0, gt=0, description="Size of the cache; beyond it the oldest values are removed.")
    address: str | None = Field(
        None, description="Ray cluster, HOST:PORT; local starts one. Default: RAY_ADDRESS, or one that runs here."
    )
    workers: int | None = Field(None, gt=0, description="Actors of a cluster. Default: one a GPU, or one a CPU core.")
    cpus_per_worker: int = Field(1, gt=0, description="CPU cores of an actor.")
    gpus_per_worker: float = Field(1.0, gt=0, description="GPUs of an actor; 0.5 puts two on each, for small models.")
    stage_dir: Path | None = Field(None, description="Folder of each node's own disk to which the store is copied.")


class Arguments(EmbedSection, JobArguments):
    """Arguments of the command."""


def main(argv: list[str]) -> int:
    """Plan, compute, publish, and print the table of performance."""
    arguments = parse(Arguments, argv, "embed", __doc__)
    request = _request(arguments)
    # Here: they load torch.
    from inference.embedding.estimate import estimate
    from inference.embedding.job import run_job
    from inference.embedding.report import table

    console = result_console()
    if arguments.dry_run:
        for line in (line for each in estimate(request) for line in _lines(each)):
            console.print(line, markup=False)
        return 0
    console.print(table(run_job(request)))
    console.print(f"written: {arguments.output}", markup=False)
    return 0


def _request(arguments: Arguments) -> JobRequest:
    models = [*([arguments.model] if arguments.model else []), *arguments.models]
    if not models:
        raise ConfigError("--model: missing; give a folder, a hub name as in facebook/esm2_t6_8M_UR50D, or a run")
    if arguments.overwrite or not any(arguments.output.glob("**/embeddings.json")):
        refuse_existing(arguments.output, MADE_BY, arguments.overwrite)
    ((_, gpus),) = local_resources()
    many = (arguments.workers or 1) > 1 or (gpus > 1 and arguments.device != "cpu")
    elsewhere = find(RaySection(address=arguments.address)) != LOCAL
    on_cluster = many or arguments.address or elsewhere
    values = {name: getattr(arguments, name) for name in EmbedSection.model_fields}
    return JobRequest(
        models=models,
        sources=arguments.input,
        output=arguments.output.absolute(),
        settings=EmbedSection(**values),
        ingest=arguments.ingest,
        device=arguments.device,
        random_weights=arguments.random_weights,
        overwrite=arguments.overwrite,
        cache=None if arguments.cache is None else arguments.cache.absolute(),
        cache_bytes=int(arguments.cache_gb * 1e9),
        cluster=RaySection(address=arguments.address) if on_cluster else None,
        workers=arguments.workers,
        cpus_per_worker=arguments.cpus_per_worker,
        gpus_per_worker=arguments.gpus_per_worker,
        stage_dir=arguments.stage_dir,
    )


def _lines(estimate: Estimate) -> list[str]:
    plan, facts = estimate.plan, estimate.facts
    records, distinct = plan.sequences.size, plan.num_sequences
    random = " (random weights)" if facts.random_weights else ""
    return [
        f"{facts.name}{random} on {facts.device_name}",
        f"  {counted(records, 'protein{s}')}, {records - distinct:,} duplicates, {distinct:,} to compute",
        f"  {int(plan.lengths.sum()):,} residues, {plan.long_sequences:,} sequences longer than the limit",
        f"  {counted(plan.num_shards, 'shard{s}')}, batches of {plan.budget:,} tokens",
        f"  {estimate.disk_bytes / 1e9:.3g} GB on disk: {', '.join(output.name for output in facts.outputs)}",
        f"  {duration(estimate.seconds)} at {estimate.residues_per_s:,.0f} residues/s, beside start and writing",
    ]
