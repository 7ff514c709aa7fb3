"""The data of a classifier before training: prepared, counted, and held against the model that is to take it.

In: the config. Out: the labelled store with its tokens, how much there is to train on, how many parameters that takes.
Imports neither torch nor transformers, so that a plan and a refusal are there at once.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from common.errors import CheckpointError, ConfigError
from common.progress import ProgressCallback
from dataset.batches.cropping import count_cropped, cropped_lengths
from dataset.labels.conversion import ensure_labelled_store
from dataset.labels.store import LabelledStore
from dataset.tokens.base import SequenceTokenizer, load_tokenizer, open_tokenizer
from dataset.tokens.token_store import ensure_tokens
from model.backbones.parameter_counts import BackboneFacts, backbone_facts, check_source
from model.cost.memory import ParameterCount, count_classifier_parameters
from model.tasks.classifier_settings import best_metric, check_pooling, loss_name
from run_folder.paths import TOKENIZER, RunFolder
from train_config.schema import Config
from training.checkpoints.checkpoint import CheckpointStore
from training.engine.deepspeed_settings import deepspeed_settings
from training.tasks.data_size import DataSize


def prepare(config: Config, root: Path, progress: ProgressCallback | None = None) -> Path:
    """Make, or find, the labelled store and its tokens.

    Args:
        config: the resolved config.
        root: folder of the stores.
        progress: called while the sequences are read.

    Returns:
        The labelled store's folder.

    Raises:
        ConfigError, DataError: the settings, the source or its labels are refused.
    """
    _check_settings(config)
    path = ensure_labelled_store(config.data, config.model.tokenizer, root, progress)
    labelled = LabelledStore(path)
    ensure_tokens(labelled.store, _tokenizer(config, labelled), path.parent, progress)
    return path


def _check_settings(config: Config) -> None:
    """Refuse what the config alone shows to be impossible."""
    section, kind = config.model.classifier, config.data.labels.kind
    best_metric(section, kind)
    loss_name(section, kind)
    check_pooling(section, kind)
    check_source(config.model.backbone)


def write_names(config: Config, run: RunFolder, path: Path) -> None:
    """Put label names and tokenizer of the prepared data into the folder of a run that was accepted."""
    labelled = LabelledStore(path)
    shutil.rmtree(run.tokenizer, ignore_errors=True)
    run.tokenizer.mkdir(parents=True)
    _tokenizer(config, labelled).save(run.tokenizer)
    labelled.label_space.save(run.path)


def check_tokenizer(config: Config, run: RunFolder, path: Path) -> None:
    """Refuse another tokenizer than the newest checkpoint was trained with.

    Raises:
        CheckpointError: it gives other token ids.
    """
    folder = CheckpointStore(run.checkpoints).newest_intact()
    if folder is None or not (folder.path / TOKENIZER).is_dir():
        return  # a checkpoint of an earlier version knows no tokenizer
    if open_tokenizer(folder.path / TOKENIZER).fingerprint != _tokenizer(config, LabelledStore(path)).fingerprint:
        raise CheckpointError(
            f"model.tokenizer: the run {run.path.name} was trained with another tokenizer than that of "
            f"{config.model.backbone.source} and model.tokenizer: restore it, or choose another run.name"
        )


def _tokenizer(config: Config, labelled: LabelledStore, *, keep: bool = True) -> SequenceTokenizer:
    """The config's tokenizer; one that is trained on the labelled store is kept beside it if ``keep``."""
    path, section = labelled.path, config.model.tokenizer
    trained = path.with_name(f"{path.name}-tokenizer-{section.vocabulary_size}") if keep else None
    return load_tokenizer(section, config.model.backbone.source, lambda: _training_texts(labelled), trained)


def _training_texts(labelled: LabelledStore) -> list[str]:
    return [labelled.text(index) for index in labelled.training.tolist()]


def measure(config: Config, path: Path) -> tuple[DataSize, ParameterCount]:
    """Training records with their tokens, and the model's parameters, counted.

    Raises:
        ConfigError: the backbone, the adapter or the head is impossible, or can't take these sequences.
    """
    labelled = LabelledStore(path)
    return _measure(config, labelled, _tokenizer(config, labelled))


def estimate(config: Config) -> tuple[DataSize, ParameterCount]:
    """The sizes of :func:`measure`, from data prepared in a folder that is thrown away: labels decide the model's size.

    Raises:
        ConfigError, DataError: as :func:`prepare`.
    """
    with TemporaryDirectory() as folder:
        _check_settings(config)
        labelled = LabelledStore(ensure_labelled_store(config.data, config.model.tokenizer, Path(folder)))
        return _measure(config, labelled, _tokenizer(config, labelled, keep=False))


def _measure(config: Config, labelled: LabelledStore, tokenizer: SequenceTokenizer) -> tuple[DataSize, ParameterCount]:
    tokens = ensure_tokens(labelled.store, tokenizer, labelled.path.parent)
    special = len(tokenizer.prefix) + len(tokenizer.suffix)
    lengths_N = cropped_lengths(tokens.lengths, config.data.max_length) + special
    judged_N = np.concatenate([labelled.training, labelled.validation])
    facts = backbone_facts(config.model.backbone, tokenizer.vocabulary_size, tokenizer.pad)
    _check_network(config, facts, int(lengths_N[judged_N].max()), special)
    cropped = count_cropped(tokens.lengths[labelled.training], config.data.max_length)
    size = DataSize(
        labelled.training.size,
        int(lengths_N[labelled.training].sum()),
        cropped.sequences,
        cropped.residues,
        exact=True,
        held_out=labelled.validation.size,
        counts=labelled.counts,
    )
    return size, count_classifier_parameters(config.model, facts, labelled.label_space, len(tokenizer.prefix))


def _check_network(config: Config, facts: BackboneFacts, longest: int, special: int) -> None:
    """Refuse what the backbone can't take, before any worker has started.

    Raises:
        ConfigError: sequences of so many tokens, or ZeRO-3.
    """
    if facts.longest is not None and longest > facts.longest:
        raise ConfigError(
            f"data.max_length: the longest sequence has {longest} tokens, and this backbone takes {facts.longest}: "
            f"set it to at most {facts.longest - special}"
        )
    stage = deepspeed_settings(config.training, config.deepspeed)["zero_optimization"]["stage"]
    if stage == 3 and facts.padded:
        raise ConfigError(
            "deepspeed.stage 3: a padded backbone is called once for each group of like lengths, of which workers have "
            "different numbers, so that they would wait for one another: use stage 2"
        )
