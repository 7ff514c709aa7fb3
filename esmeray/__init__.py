"""Training and inference of protein language models and sequence classifiers, distributed on Ray.

The names below are the public API; the rest of the package is private and may change. Each name is imported on first
use: ``import esmeray`` alone loads neither torch nor Ray. Type checkers read ``__init__.pyi``.
"""

import os
from importlib import import_module
from tempfile import gettempdir
from typing import Any

__version__ = "0.1.0"

# Torch reads this at its first large tensor, then allocates memory in pages of 2 MB. With 4 kB pages, a layer of a 3B
# model in fresh memory takes three times as long; in return, embedding with ESM-2 8M uses a quarter more memory.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# A container's user without an entry in passwd has no HOME, or Docker's and Kubernetes' /, which is not writable.
# Libraries then fail (ray.train 2.60 on import) or have no caches. Use a folder in the temporary folder instead.
_home = os.path.expanduser("~")  # noqa: PTH111 - Path.expanduser raises without a home
if _home == "~" or (_home == "/" and not os.access(_home, os.W_OK)):
    os.environ["HOME"] = str(import_module("esmeray.common.own_folders").own_folder(gettempdir()))

# Module names as strings, since importing the modules takes seconds.
_MODULES = {
    "ClassifierPipeline": "inference.classifier",
    "Client": "service.client",
    "ESM2Autoencoder": "tasks.autoencoder.model",
    "Embeddings": "dataset.embeddings.reader",
    "EsmerayError": "common.errors",
    "Model": "inference.models.model",
    "Store": "dataset.store.reader",
    "align": "inference.alignment",
    "build_index": "inference.index.build",
    "choose_layer": "inference.layers",
    "classify": "inference.classify.calls",
    "design": "inference.design.calls",
    "evaluate": "inference.classify.calls",
    "evaluate_functions": "function.evaluation",
    "fit_mutants": "inference.mutations.calls",
    "open_model": "inference.models.opening",
    "open_store": "dataset.store.reader",
    "predict_functions": "inference.function.prediction",
    "propose": "inference.mutations.calls",
    "read_annotations": "function.annotations",
    "read_embeddings": "dataset.embeddings.reader",
    "read_ontology": "function.ontology",
    "read_scores": "function.annotations",
    "scan": "inference.mutations.calls",
    "score_mutants": "inference.mutations.fitted",
    "search": "inference.index.search",
    "train": "tools.train._experiment",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'esmeray' has no attribute {name!r}")
    # Looked up on each access: a cached name would hide what a test or a reload puts into its module.
    return getattr(import_module(f"esmeray.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
