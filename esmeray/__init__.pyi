"""Names of the package for type checkers, which can't follow ``__getattr__``."""

from esmeray.common.errors import EsmerayError as EsmerayError
from esmeray.dataset.embeddings.reader import Embeddings as Embeddings
from esmeray.dataset.embeddings.reader import read_embeddings as read_embeddings
from esmeray.dataset.store.reader import Store as Store
from esmeray.dataset.store.reader import open_store as open_store
from esmeray.function.annotations import read_annotations as read_annotations
from esmeray.function.annotations import read_scores as read_scores
from esmeray.function.evaluation import evaluate_functions as evaluate_functions
from esmeray.function.ontology import read_ontology as read_ontology
from esmeray.inference.alignment import align as align
from esmeray.inference.classifier import ClassifierPipeline as ClassifierPipeline
from esmeray.inference.classify.calls import classify as classify
from esmeray.inference.classify.calls import evaluate as evaluate
from esmeray.inference.design.calls import design as design
from esmeray.inference.function.prediction import predict_functions as predict_functions
from esmeray.inference.index.build import build_index as build_index
from esmeray.inference.index.search import search as search
from esmeray.inference.layers import choose_layer as choose_layer
from esmeray.inference.models.model import Model as Model
from esmeray.inference.models.opening import open_model as open_model
from esmeray.inference.mutations.calls import fit_mutants as fit_mutants
from esmeray.inference.mutations.calls import propose as propose
from esmeray.inference.mutations.calls import scan as scan
from esmeray.inference.mutations.fitted import score_mutants as score_mutants
from esmeray.service.client import Client as Client
from esmeray.tasks.autoencoder.model import ESM2Autoencoder as ESM2Autoencoder
from esmeray.tools.train._experiment import train as train

__version__: str
