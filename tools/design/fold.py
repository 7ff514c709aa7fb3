"""Predict structures of the proteins of FASTA files or of a store, and keep them for training.

Each distinct sequence is predicted once, by a pool of Ray actors or in this process, in batches of like lengths. What
is done is kept in the cache: the same command goes on where one was ended, several may run at once, and beyond
--cache-gb the oldest predictions are removed. Training takes the folder that is printed as data.predictions.folder.

Examples:
  esmeray design fold proteins.fasta --model facebook/esmfold_v1 --cache predictions
  esmeray design fold proteins.fasta --predictor esmfold2 --model biohub/ESMFold2 --cache predictions
  esmeray design fold store/ --model esmfold/ --cache predictions --workers 8 --gpus-per-worker 0.5
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from pydantic import Field

from cluster.placement import find
from common.arguments import ToolArguments, parse
from common.command_line import result_console
from common.errors import ConfigError, DataError, ResourceError
from common.progress import record_bar
from common.text import counted
from dataset.structures.conversion import read_proteins
from train_config.schema import RaySection


class Arguments(ToolArguments):
    """Sequences, predictor, devices."""

    input: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="FASTA|STORE ...")] = Field(
        min_length=1, description="FASTA files, folders or globs, or a store."
    )
    model: str = Field(description="Folder or hub name of the predictor's weights.")
    predictor: str = Field("esmfold", description="Kind of predictor: esmfold, esmfold2, or one of --predictor-module.")
    predictor_module: list[str] = Field([], description="Modules to import, which register further kinds.")
    cache: Path = Field(description="Folder to keep predictions in.")
    cache_gb: float = Field(50.0, gt=0, description="Size of the cache.")
    max_length: int = Field(1024, gt=0, description="Residues; longer sequences are left out.")
    tokens: int = Field(1024, gt=0, description="Residues of a batch.")
    device: Literal["cpu", "cuda"] | None = Field(None, description="Default: CUDA where there is one.")
    workers: int | None = Field(None, gt=0, description="Actors on Ray. Default: this process alone.")
    address: str | None = Field(None, description="Ray cluster, HOST:PORT; local starts one.")
    cpus_per_worker: int = Field(1, gt=0, description="CPU cores of an actor.")
    gpus_per_worker: float = Field(1.0, gt=0, description="GPUs of an actor; 0.5 puts two on each.")
    max_failures: int = Field(3, ge=0, description="Times that a batch may lose its actor.")


def main(argv: list[str]) -> int:
    """Read, predict, say what was done."""
    arguments = parse(Arguments, argv, "design fold", __doc__)
    if arguments.workers is not None:
        find(RaySection(address=arguments.address))
    elif arguments.address is not None:
        raise ConfigError("--address: give --workers, too: without them this process alone predicts")
    sequences = [text for text in read_proteins(arguments.input)[1] if len(text) <= arguments.max_length]
    if not sequences:
        raise DataError(f"{', '.join(arguments.input)}: no sequence of up to {arguments.max_length} residues")
    import torch  # here: it takes seconds

    from inference.folding.job import FoldingSettings, actors, predict_structures

    options: dict[str, Any] = {"tokens": arguments.tokens, "cache_bytes": int(arguments.cache_gb * 1e9)}

    def settings(has_gpu: bool, cpus: int | None) -> FoldingSettings:
        device, modules = arguments.device or ("cuda" if has_gpu else "cpu"), tuple(arguments.predictor_module)
        if device == "cuda" and not has_gpu:
            raise ResourceError("--device cuda: there is no GPU here; use --device cpu")
        cache = arguments.cache.absolute()
        return FoldingSettings(arguments.predictor, arguments.model, cache, device, modules, cpus)

    with record_bar("predicting") as bar:
        options["progress"] = lambda done, total: bar(done / max(1, total), done)
        if arguments.workers is None:
            report = predict_structures(sequences, settings(torch.cuda.is_available(), None), **options)
        else:
            from cluster.connection import cluster_resources, connected

            with connected(RaySection(address=arguments.address)):
                of = settings(any(node.gpus for node in cluster_resources()), arguments.cpus_per_worker)
                count, cpus, gpus = arguments.workers, arguments.cpus_per_worker, arguments.gpus_per_worker
                failures = arguments.max_failures
                options["pool"] = lambda of: actors(of, count, cpus, gpus, max_failures=failures)
                report = predict_structures(sequences, of, **options)
    console = result_console()
    removed = f", {counted(report.removed_shards, 'shard{s}')} removed for its size" if report.removed_shards else ""
    distinct = counted(report.sequences, "distinct sequence{s}")
    console.print(f"{report.folder}: {distinct}, {report.hit_rate:.1%} of them there before{removed}", markup=False)
    return 0
