"""From the model section of the config to a task model: the one place that knows the tasks by name.

A new task is a TaskModel in its own module and one line in ``_BUILDERS``.
"""

from __future__ import annotations

from collections.abc import Callable

from transformers import EsmForMaskedLM

from model.autoencoder import ESM2Autoencoder
from model.backbone import EsmBackbone, load_network, seeded
from model.masked_lm import MaskedLM
from model.task import TaskModel
from train_config.schema import ModelSection


def build_model(section: ModelSection, seed: int) -> TaskModel:
    """The model to train, in fp32 on the CPU, in training mode.

    Weights that are drawn depend on ``seed`` alone; the global random state is left as it was.

    Raises:
        ConfigError: the backbone's source or size is wrong.
        DataError: the weights can't be read.
        ResourceError: the hub can't be reached.
    """
    return assemble(section, load_network(section.backbone, seed), seed).train()


def assemble(section: ModelSection, network: EsmForMaskedLM, seed: int) -> TaskModel:
    """The task's model around a Hugging Face network, which is taken over."""
    with seeded(seed + 1):  # not the backbone's stream again
        return _BUILDERS[section.task](section, network)


def _autoencoder(section: ModelSection, network: EsmForMaskedLM) -> TaskModel:
    backbone = EsmBackbone(
        network.esm,
        frozen=section.backbone.frozen,
        gradient_checkpointing=section.backbone.gradient_checkpointing,
    )
    return ESM2Autoencoder(backbone, section.autoencoder)


def _masked_lm(section: ModelSection, network: EsmForMaskedLM) -> TaskModel:
    return MaskedLM(
        network,
        frozen=section.backbone.frozen,
        gradient_checkpointing=section.backbone.gradient_checkpointing,
    )


_BUILDERS: dict[str, Callable[[ModelSection, EsmForMaskedLM], TaskModel]] = {
    "autoencoder": _autoencoder,
    "masked_lm": _masked_lm,
}
