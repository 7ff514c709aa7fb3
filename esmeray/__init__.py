"""Training and inference of protein language models and sequence classifiers, distributed on Ray.

The names below are what others may build upon; the rest of the package is private and may change. Each is imported when
it is first used: ``import esmeray`` alone takes neither torch nor Ray.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from esmeray.common.errors import EsmerayError as EsmerayError
    from esmeray.dataset.embeddings.reader import Embeddings as Embeddings
    from esmeray.dataset.embeddings.reader import read_embeddings as read_embeddings
    from esmeray.dataset.store.reader import Store as Store
    from esmeray.dataset.store.reader import open_store as open_store
    from esmeray.function.annotations import read_annotations as read_annotations
    from esmeray.function.annotations import read_scores as read_scores
    from esmeray.function.evaluation import evaluate_functions as evaluate_functions
    from esmeray.function.ontology import read_ontology as read_ontology
    from esmeray.inference.classifier import ClassifierPipeline as ClassifierPipeline
    from esmeray.inference.models.model import Model as Model
    from esmeray.inference.models.opening import open_model as open_model
    from esmeray.inference.mutations.scoring import score_mutants as score_mutants
    from esmeray.model.tasks.autoencoder import ESM2Autoencoder as ESM2Autoencoder
    from esmeray.service.client import Client as Client
    from esmeray.tools.train._experiment import train as train

# In a checkout the rooms are the folders beside this one; in a wheel they lie in it.
_checkout = Path(__file__).parents[1]
if (_checkout / "train_ray.py").is_file():
    __path__.append(str(_checkout))

_MODULES = {
    "Client": "service.client",
    "ClassifierPipeline": "inference.classifier",
    "ESM2Autoencoder": "model.tasks.autoencoder",
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
    "score_mutants": "inference.mutations.scoring",
    "train": "tools.train._experiment",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'esmeray' has no attribute {name!r}")
    return getattr(import_module(f"esmeray.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
