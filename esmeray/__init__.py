"""Training and inference of protein language models and sequence classifiers, distributed on Ray.

The names below are what others may build upon; the rest of the package is private and may change. Each is imported when
it is first used: ``import esmeray`` alone takes neither torch nor Ray. Type checkers read ``__init__.pyi``.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

# In a checkout the rooms are the folders beside this one; in a wheel they lie in it.
_checkout = Path(__file__).parents[1]
if (_checkout / "train_ray.py").is_file():
    __path__.append(str(_checkout))

# Torch, which reads this at its first large tensor, then asks for memory in pages of 2 MB: with pages of 4 kB a layer
# of 3B in fresh memory takes three times as long, and embedding with ESM-2 8M a quarter more memory.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# Libraries fail without a home, ray.train (2.60) when it is imported. A container's user without HOME and without an
# entry in passwd gets the home that Debian gives to users without one, which does not exist.
try:
    Path.home()
except RuntimeError:
    os.environ["HOME"] = "/nonexistent"
_caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
if not (os.access(_caches, os.W_OK) or os.access(_caches.parent, os.W_OK)):
    import_module("esmeray.common.own_folders").move_caches(_caches)

# Modules as texts, since importing them is what takes seconds.
_MODULES = {
    "Client": "service.client",
    "ClassifierPipeline": "inference.classifier",
    "ESM2Autoencoder": "tasks.autoencoder.model",
    "Embeddings": "dataset.embeddings.reader",
    "EsmerayError": "common.errors",
    "Model": "inference.models.model",
    "Store": "dataset.store.reader",
    "evaluate_functions": "function.evaluation",
    "open_model": "inference.models.opening",
    "open_store": "dataset.store.reader",
    "read_annotations": "function.annotations",
    "read_embeddings": "dataset.embeddings.reader",
    "read_ontology": "function.ontology",
    "read_scores": "function.annotations",
    "score_mutants": "inference.mutations.fitted",
    "train": "tools.train._experiment",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'esmeray' has no attribute {name!r}")
    # Each time anew: a name kept here would hide what a test or a reload puts into its module.
    return getattr(import_module(f"esmeray.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
