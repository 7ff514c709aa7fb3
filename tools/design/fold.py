"""Predict structures of the proteins of FASTA files or of a store, and keep them for training.

Each distinct sequence is predicted once, by a pool of Ray actors or in this process, in batches of like lengths. What
is done is saved in the cache: the same command resumes where one was ended, several may run at once, and beyond
--fold.cache_gb the oldest predictions are removed. Training takes the folder that is printed as
data.predictions.folder.

Examples:
  esmeray design fold --fold.input proteins.fasta --fold.model facebook/esmfold_v1 --fold.cache predictions
  esmeray design fold --fold.input proteins.fasta --fold.predictor esmfold2 --fold.model biohub/ESMFold2 \
--fold.cache predictions
  esmeray design fold --fold.input store/ --fold.model esmfold/ --fold.cache predictions --fold.workers 8 \
--fold.gpus_per_worker 0.5
"""

from typing import Any

from esmeray.cluster.placement import find
from esmeray.cluster.section import RaySection
from esmeray.common.command_line import result_console
from esmeray.common.errors import ConfigError, DataError, ResourceError
from esmeray.common.progress import record_bar
from esmeray.common.text import counted
from esmeray.dataset.structures.conversion import read_proteins
from esmeray.dataset.tokens.model_folder import check_model
from esmeray.tools.grammar import Plain, parse
from esmeray.train_config.command_schema import FoldSettings


def main(argv: list[str]) -> int:
    _, settings = parse(argv, "design fold", __doc__, Plain, FoldSettings)
    arguments, address = settings.fold, settings.ray.address
    if arguments.workers is not None:
        find(RaySection(address=address))
    elif address is not None:
        raise ConfigError("--ray.address: give --fold.workers, too: without them this process alone predicts")
    if not arguments.predictor_module:  # what a predictor of somebody else's takes for its source is its own affair
        check_model(arguments.model, "model")
    sequences = [text for text in read_proteins(arguments.input)[1] if len(text) <= arguments.max_length]
    if not sequences:
        raise DataError(f"{', '.join(arguments.input)}: no sequence of up to {arguments.max_length} residues")
    import torch  # here: it takes seconds

    from esmeray.inference.folding.job import FoldingSettings, actors, predict_structures

    options: dict[str, Any] = {"tokens": arguments.tokens, "cache_bytes": int(arguments.cache_gb * 1e9)}

    def predictor(has_gpu: bool, cpus: int | None) -> FoldingSettings:
        device, modules = arguments.device or ("cuda" if has_gpu else "cpu"), tuple(arguments.predictor_module)
        if device == "cuda" and not has_gpu:
            raise ResourceError("--fold.device cuda: there is no GPU here; use --fold.device cpu")
        return FoldingSettings(arguments.predictor, arguments.model, arguments.cache.absolute(), device, modules, cpus)

    with record_bar("predicting") as bar:
        options["progress"] = lambda done, total: bar(done / max(1, total), done)
        if arguments.workers is None:
            report = predict_structures(sequences, predictor(torch.cuda.is_available(), None), **options)
        else:
            from esmeray.cluster.connection import cluster_resources, connected

            with connected(RaySection(address=address)):
                on_actors = predictor(any(node.gpus for node in cluster_resources()), arguments.cpus_per_worker)
                count, cpus, gpus = arguments.workers, arguments.cpus_per_worker, arguments.gpus_per_worker
                workers = actors(on_actors, count, cpus, gpus, max_failures=arguments.max_failures)
                report = predict_structures(sequences, on_actors, workers=workers, **options)
    console = result_console()
    removed = f", {counted(report.removed_shards, 'shard{s}')} removed for its size" if report.removed_shards else ""
    distinct = counted(report.sequences, "distinct sequence{s}")
    share = report.cached / max(1, report.sequences)
    console.print(f"{report.folder}: {distinct}, {share:.1%} of them there before{removed}", markup=False)
    return 0
