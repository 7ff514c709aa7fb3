"""From the model section of the config to a task model: the one place that knows the tasks by name.

A new task on residues is a TaskModel in its own module and one line in ``_BUILDERS``; the classifier, whose outputs
depend on the labels found in the data, is built by :func:`build_classifier`. Every task takes every backbone.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from dataset.labels.label_space import LabelSpace
from dataset.tokens.base import SequenceTokenizer
from model.backbones.loading import build_backbone, seeded
from model.backbones.lora import adapt
from model.backbones.residues import residue_backbone, residue_masked_lm
from model.tasks.autoencoder import ESM2Autoencoder
from model.tasks.base import TaskModel
from model.tasks.classifier import Classifier
from model.tasks.masked_lm import MaskedLM
from train_config.schema import ModelSection


def build_model(section: ModelSection, seed: int, *, empty: bool = False) -> TaskModel:
    """The model to train on residues, in fp32 on the CPU, in training mode.

    Weights that are drawn depend on ``seed`` alone; the global random state is left as it was.

    Args:
        section: the model.
        seed: of the run.
        empty: on the meta device, without weights: to count them before any is read.

    Raises:
        ConfigError: the backbone's source or size is wrong, or it does not go with the task.
        DataError: the weights can't be read.
        ResourceError: the hub can't be reached.
    """
    return _BUILDERS[section.task](section, seed, empty).train()


def build_classifier(
    section: ModelSection,
    seed: int,
    label_space: LabelSpace,
    tokenizer: SequenceTokenizer,
    class_weights: Tensor | None = None,
    target_scale: tuple[Tensor, Tensor] | None = None,
) -> Classifier:
    """The classifier to train, in fp32 on the CPU, in training mode.

    Weights that are drawn depend on ``seed`` alone; the global random state is left as it was.

    Args:
        section: the model.
        seed: of the run.
        label_space: what is predicted.
        tokenizer: whose tokens the backbone takes.
        class_weights: (C,) fp32 or None.
        target_scale: (C,) means and (C,) standard deviations of a regression's targets, or None.

    Raises:
        ConfigError: the backbone, the adapter or the head is impossible.
        DataError: the weights can't be read.
        ResourceError: the hub can't be reached.
    """
    backbone = build_backbone(section.backbone, seed, tokenizer.vocabulary_size, tokenizer.pad)
    with seeded(seed + 1):  # not the backbone's stream again
        if section.backbone.lora.rank:
            adapt(backbone, section.backbone.lora)
        return Classifier(
            backbone,
            section.classifier,
            label_space,
            class_weights,
            target_scale,
            num_prefix=len(tokenizer.prefix),
            num_suffix=len(tokenizer.suffix),
        ).train()


def _autoencoder(section: ModelSection, seed: int, empty: bool) -> TaskModel:
    backbone = residue_backbone(section.backbone, seed, empty=empty)
    with seeded(seed + 1):  # not the backbone's stream again
        return ESM2Autoencoder(backbone, section.autoencoder)


def _masked_lm(section: ModelSection, seed: int, empty: bool) -> TaskModel:
    return MaskedLM(*residue_masked_lm(section.backbone, seed, empty=empty))


_BUILDERS: dict[str, Callable[[ModelSection, int, bool], TaskModel]] = {
    "autoencoder": _autoencoder,
    "masked_lm": _masked_lm,
}
