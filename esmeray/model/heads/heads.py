"""Heads of a classifier, from a backbone's features to fp32 outputs, and pooling with trainable weights.

Shape legend: T tokens in the batch, N sequences, S rows with gaps between the sequences, M rows of a head (sequences,
or tokens), D channels, K outputs.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from esmeray.dataset.packed_batch import PackedBatch
from esmeray.model.heads.pooling import pool, residue_mask, residues_of
from esmeray.model.section import ClassifierSection


class LightAttention(nn.Module):
    """Light attention pooling (Stärk et al. 2021, doi:10.1093/bioadv/vbab035; HannesStark/protein-localization).

    Two convolutions over each sequence give every residue a value and a score per channel. The output is the
    concatenation of the values' mean, weighted by the softmax of the scores, and their maximum. Like the paper,
    the class leaves out special tokens: the convolutions see zeros instead, as beyond the ends of a sequence.
    ``kernel``: size of the convolutions in tokens; an even kernel extends one token further to the right than to the
    left.
    """

    def __init__(self, channels: int, kernel: int, dropout: float, num_prefix: int = 1, num_suffix: int = 1) -> None:
        super().__init__()
        self.feature_convolution = nn.Conv1d(channels, channels, kernel)  # padded by the gaps of forward
        self.attention_convolution = nn.Conv1d(channels, channels, kernel)
        self.dropout = nn.Dropout(dropout)
        self.num_prefix, self.num_suffix = num_prefix, num_suffix

    def forward(self, features_TD: Tensor, batch: PackedBatch) -> Tensor:
        """Return (N, 2 D) fp32, zeros for a sequence without residues. Does not synchronize with the device."""
        segments_T = batch.segment_ids()
        residue_T1 = residue_mask(batch, self.num_prefix, self.num_suffix).unsqueeze(1)
        # Separate sequences by enough zeros that no convolution reaches a neighbour, and pad both ends.
        (kernel,) = self.feature_convolution.kernel_size
        gap = kernel // 2
        rows_T = torch.arange(batch.num_tokens, device=segments_T.device) + gap * segments_T
        rows = batch.num_tokens + gap * (batch.num_sequences - 1) + kernel - 1
        # torch.where instead of a product, so that a NaN in a special token is removed.
        inputs_TD = torch.where(residue_T1, features_TD, 0.0).to(self.feature_convolution.weight.dtype)
        inputs_SD = inputs_TD.new_zeros(rows, inputs_TD.shape[1]).index_copy(0, rows_T + (kernel - 1) // 2, inputs_TD)
        values_TD = self.dropout(_convolve(self.feature_convolution, inputs_SD, rows_T))
        scores_TD = _convolve(self.attention_convolution, inputs_SD, rows_T)
        residues = residues_of(batch, self.num_prefix, self.num_suffix)
        return torch.cat((pool("attention", values_TD, *residues, scores_TD), pool("max", values_TD, *residues)), dim=1)


class Float32Linear(nn.Linear):
    """Linear layer that computes in fp32, whatever the dtype of its weights.

    In bf16, outputs would have two or three decimal digits, too few for regression.
    """

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return functional.linear(input.float(), self.weight.float(), bias)


class CastingLinear(nn.Linear):
    """Linear layer that casts its input to the dtype of its weights, because pooled features are always fp32."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(self.weight.dtype))


def build_head(
    section: ClassifierSection, channels: int, outputs: int, *, light_attention: bool = False
) -> nn.Sequential:
    """Build a module from (M, D) features of any dtype to (M, K) fp32 outputs, with or without a hidden layer.

    ``light_attention``: the features come from :class:`LightAttention`, which applies dropout before pooling. The
    hidden layer is then as in the paper: linear, dropout, ReLU, normalization. It normalizes rows instead of the batch,
    because the number of sequences of a packed batch varies, and includes fillers.
    """
    dropout = section.dropout
    # Named modules, because the code in a model card finds the weights of an export by these names.
    modules: dict[str, nn.Module] = {} if light_attention else {"dropout": nn.Dropout(dropout)}
    if section.head == "mlp":
        modules["hidden"] = CastingLinear(channels, section.hidden_size)
        channels = section.hidden_size
        if light_attention:
            modules |= {"hidden_dropout": nn.Dropout(dropout), "relu": nn.ReLU(), "norm": nn.LayerNorm(channels)}
        else:
            modules |= {"gelu": nn.GELU(), "hidden_dropout": nn.Dropout(dropout)}
    return nn.Sequential(OrderedDict(modules, output=Float32Linear(channels, outputs)))


def _convolve(convolution: nn.Conv1d, inputs_SD: Tensor, rows_T: Tensor) -> Tensor:
    return convolution(inputs_SD.t().unsqueeze(0)).squeeze(0).t().index_select(0, rows_T).float()
