"""Copies beside the device's work: to the device, and back."""

import pytest
import torch

from esmeray.model.device import HostCopy
from esmeray.training.loop.stepping import BatchCopies
from tests.model.support import masked_batch, no_waiting, random_sequences

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.mark.parametrize("device", DEVICES)
def test_batches_and_results_are_copied_as_they_are(device):
    batch = masked_batch(random_sequences([12, 5]), [0.3, 0.3])
    if device == "cuda":
        batch = batch.pin_memory()
    copied = BatchCopies(torch.device(device)).copy(batch)
    assert copied.tokens.device.type == device
    back = HostCopy({"tokens": copied.tokens, "sum": copied.tokens.sum()}).read()
    assert torch.equal(back["tokens"], batch.tokens)
    assert int(back["sum"]) == int(batch.tokens.sum())
    assert {tensor.device.type for tensor in back.values()} == {"cpu"}


@pytest.mark.cuda
def test_neither_copy_waits_for_the_device():
    batch = masked_batch(random_sequences([12, 5]), [0.3, 0.3]).pin_memory()
    copies = BatchCopies(torch.device("cuda"))
    with no_waiting():
        HostCopy({"tokens": copies.copy(batch).tokens}).read()
