"""The data of a classifier before training: prepared, counted, and held against the model that is to take it.

In: the config. Out: the labelled store with its tokens, how much there is to train on, how many parameters that takes.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from dataset.labelled_batches import LabelledSource
from dataset.labelled_conversion import ensure_labelled_store
from dataset.labelled_store import LabelledStore
from dataset.progress import ProgressCallback
from dataset.token_store import ensure_tokens
from dataset.tokenizers import SequenceTokenizer, load_tokenizer
from model.backbones import PaddedBackbone, empty_backbone
from model.classification_metrics import FIGURES
from model.memory import ParameterCount, count_classifier_parameters
from train_config.errors import ConfigError
from train_config.schema import Config
from training.data_size import DataSize
from training.deepspeed_settings import deepspeed_settings
from training.run_folder import RunFolder

BEST_METRIC = {"multilabel": "f1_micro", "regression": "spearman"}


def prepare(config: Config, root: Path, progress: ProgressCallback | None = None) -> Path:
    """Make, or find, the labelled store and its tokens.

    Args:
        config: the resolved config.
        root: folder of the stores.
        progress: called while the sequences are read.

    Returns:
        The labelled store's folder.

    Raises:
        ConfigError, DataError: the source or its labels are refused.
    """
    best_metric(config)
    path = ensure_labelled_store(config.data, config.model.tokenizer, root, progress)
    labelled = LabelledStore(path)
    ensure_tokens(labelled.store, _tokenizer(config, labelled), path.parent, progress)
    return path


def write_names(config: Config, run: RunFolder, path: Path) -> None:
    """Put label names and tokenizer of the prepared data into the folder of a run that was accepted."""
    labelled = LabelledStore(path)
    shutil.rmtree(run.tokenizer, ignore_errors=True)
    run.tokenizer.mkdir(parents=True)
    _tokenizer(config, labelled).save(run.tokenizer)
    labelled.label_space.save(run.path)


def _tokenizer(config: Config, labelled: LabelledStore) -> SequenceTokenizer:
    """The config's tokenizer; one that is trained on the labelled store lies beside it."""
    path, section = labelled.path, config.model.tokenizer
    trained = path.with_name(f"{path.name}-tokenizer-{section.vocabulary_size}")
    return load_tokenizer(section, config.model.backbone.source, lambda: _training_texts(labelled), trained)


def _training_texts(labelled: LabelledStore) -> list[str]:
    return [labelled.text(index) for index in labelled.training.tolist()]


def measure(config: Config, path: Path) -> tuple[DataSize, ParameterCount]:
    """Training records with their tokens, and the model's parameters, counted.

    Raises:
        ConfigError: the backbone, the adapter or the head is impossible, or can't take these sequences.
    """
    labelled = LabelledStore(path)
    tokenizer = _tokenizer(config, labelled)
    tokens = ensure_tokens(labelled.store, tokenizer, path.parent)
    source = LabelledSource(tokens, None, max_length=config.data.max_length, crop="start")
    lengths_N, cropped = source.token_lengths(labelled.training), source.count_cropped(labelled.training)
    judged_N = np.concatenate([labelled.training, labelled.validation])
    _check_network(config, tokenizer, int(source.token_lengths(judged_N).max()))
    size = DataSize(
        lengths_N.size,
        int(lengths_N.sum()),
        cropped.sequences,
        cropped.residues,
        exact=True,
        held_out=labelled.validation.size,
        counts=labelled.counts,
    )
    return size, count_classifier_parameters(config.model, labelled.label_space, tokenizer)


def best_metric(config: Config) -> str:
    """The figure that says which checkpoint is best.

    Raises:
        ConfigError: an evaluation of this kind of targets has no such figure.
    """
    kind, name = config.data.labels.kind, config.model.classifier.best_metric
    if name == "auto":
        return BEST_METRIC.get(kind, "mcc")
    known = ("loss", *FIGURES[kind])
    if name not in known:
        raise ConfigError(
            f"model.classifier.best_metric: an evaluation of {kind} has no figure {name!r}; it has {', '.join(known)}"
        )
    return name


def _check_network(config: Config, tokenizer: SequenceTokenizer, longest: int) -> None:
    """What the backbone can't take, before any worker has started.

    Raises:
        ConfigError: sequences of so many tokens, or ZeRO-3.
    """
    backbone = empty_backbone(config.model.backbone, tokenizer.vocabulary_size, tokenizer.pad)
    special = len(tokenizer.prefix) + len(tokenizer.suffix)
    if backbone.longest is not None and longest > backbone.longest:
        raise ConfigError(
            f"data.max_length: the longest sequence has {longest} tokens, and this backbone takes {backbone.longest}: "
            f"set it to at most {backbone.longest - special}"
        )
    stage = deepspeed_settings(config.training, config.deepspeed)["zero_optimization"]["stage"]
    if stage == 3 and isinstance(backbone, PaddedBackbone):
        raise ConfigError(
            "deepspeed.stage 3: a padded backbone is called once for each group of like lengths, of which workers have "
            "different numbers, so that they would wait for one another: use stage 2"
        )


def estimate(config: Config) -> tuple[DataSize, ParameterCount]:
    """What :func:`measure` gives, from data prepared in a folder that is thrown away: labels decide the model's size.

    Raises:
        ConfigError, DataError: as :func:`prepare`.
    """
    with TemporaryDirectory() as folder:
        return measure(config, prepare(config, Path(folder)))
