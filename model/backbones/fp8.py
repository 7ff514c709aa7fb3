"""Matrix products of a backbone's layers in FP8, by torchao: both passes, scaled by row; weights and gradients stay.

FP8 products run twice as fast as bf16's on Hopper and later; rounding each row of activations, weights and gradients
takes some of that back, so that it pays from about 1,280 channels on.
"""

from dataclasses import replace

from torch import nn

from common.errors import ConfigError
from model.backbones.base import PackedBackbone

_MULTIPLE = 16
"""What FP8's kernels want both sides of a weight to be divisible by."""


def use_fp8(backbone: PackedBackbone, *, emulate: bool = False) -> None:
    """Have the Linears of every layer multiply in FP8. To be called before the layers are compiled.

    ``emulate``: round as FP8 does and multiply in the weights' precision, which any device can. Parameters keep their
    names, so that checkpoints and exports are those of bf16. Raises ConfigError where torchao is not installed.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError("training.fp8 needs torchao: pip install torchao") from error

    def takes(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and not (module.in_features | module.out_features) % _MULTIPLE

    # Padded: weights' gradients are products over tokens, of which a part of a batch has any number.
    config = replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=emulate, pad_inner_dim=True)
    for layer in backbone.layers:
        convert_to_float8_training(layer, module_filter_fn=takes, config=config)
