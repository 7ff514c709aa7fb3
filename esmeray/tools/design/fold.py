"""Predict the structures of proteins in FASTA files or in a store, and keep them for training.

Each distinct sequence is predicted once, by a pool of Ray actors or in this process, in batches of similar lengths.
Predictions are saved in the cache as they are done. The same command resumes an interrupted job, and several may run at
once. If the cache exceeds --fold.cache_gb, its oldest predictions are removed. Set data.predictions.folder to the
printed folder for training.

Examples:
  esmeray design fold --fold.input proteins.fasta --fold.model facebook/esmfold_v1 --fold.cache predictions
  esmeray design fold --fold.input proteins.fasta --fold.predictor esmfold2 --fold.model biohub/ESMFold2 \
--fold.cache predictions
  esmeray design fold --fold.input store/ --fold.model esmfold/ --fold.cache predictions --fold.workers 8
"""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from esmeray.cluster.placement import find
from esmeray.cluster.section import RaySection
from esmeray.common.command_line import result_console
from esmeray.common.errors import ConfigError, DataError, ResourceError
from esmeray.common.progress import record_bar
from esmeray.common.text import counted
from esmeray.dataset.structures.conversion import read_proteins
from esmeray.dataset.tokens.model_folder import check_model
from esmeray.tools.grammar import ClusterSection, command
from esmeray.train_config.section import PositiveFloat, PositiveInt, Section


class FoldSection(Section):
    """Sequences, the predictor of their structures, and its resources."""

    input: list[str] = Field(min_length=1)
    """FASTA files, folders or globs, or a store."""
    model: str
    """Folder or hub name of the predictor's weights."""
    predictor: str = "esmfold"
    """Kind of predictor: esmfold or esmfold2."""
    cache: Path
    """Folder to keep predictions in."""
    cache_gb: PositiveFloat = 50.0
    """Maximum size of the cache in GB."""
    max_length: PositiveInt = 1024
    """Maximum length of a sequence in residues; longer sequences are left out."""
    tokens: PositiveInt = 1024
    """Maximum number of residues in a batch."""
    device: Literal["cpu", "cuda"] | None = None
    """Device to compute on: cpu or cuda. Default: CUDA if available."""
    workers: PositiveInt | None = None
    """Number of Ray actors that predict. Default: no actors, this process predicts."""


@command("design fold", __doc__)
def main(fold: FoldSection, ray: ClusterSection) -> None:
    address = ray.address
    if fold.workers is not None:
        # Checks the address before sequences are read and torch is loaded.
        find(RaySection(address=address))
    elif address is not None:
        raise ConfigError("--ray.address needs --fold.workers; without workers, this process predicts")
    check_model(fold.model, "model")
    # The predictor's memory grows with the square of the length: longer sequences would run out of memory.
    sequences = [text for text in read_proteins(fold.input)[1] if len(text) <= fold.max_length]
    if not sequences:
        raise DataError(f"{', '.join(fold.input)}: no sequence with at most {fold.max_length} residues")
    import torch  # here: it takes seconds

    from esmeray.inference.folding.job import FoldingSettings, actors, predict_structures

    def predictor(has_gpu: bool, cpus: int | None) -> FoldingSettings:
        device = fold.device or ("cuda" if has_gpu else "cpu")
        if device == "cuda" and not has_gpu:
            raise ResourceError("--fold.device cuda: no GPU found; use --fold.device cpu")
        return FoldingSettings(fold.predictor, fold.model, fold.cache.absolute(), device, cpus)

    with record_bar("predicting") as bar:
        options: dict[str, Any] = {
            "tokens": fold.tokens,
            "cache_bytes": int(fold.cache_gb * 1e9),
            "progress": lambda done, total: bar(done / max(1, total), done),
        }
        # Without workers this process predicts, because a cluster takes seconds to start.
        if fold.workers is None:
            report = predict_structures(sequences, predictor(torch.cuda.is_available(), None), **options)
        else:
            from esmeray.cluster.connection import cluster_resources, connected

            with connected(RaySection(address=address)):
                # Look at the cluster's GPUs: this machine may be a login node without any.
                on_actors = predictor(any(node.gpus for node in cluster_resources()), 1)
                workers = actors(on_actors, fold.workers, 1)
                report = predict_structures(sequences, on_actors, workers=workers, **options)
    removed = (
        f", {counted(report.removed_shards, 'shard{s}')} removed to limit its size" if report.removed_shards else ""
    )
    distinct = counted(report.sequences, "distinct sequence{s}")
    share = report.cached / max(1, report.sequences)
    result_console().print(f"{report.folder}: {distinct}, {share:.1%} already in the cache{removed}", markup=False)
