from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from esmeray.cluster.collective import ControlGroup
from esmeray.common.errors import DataError, ResourceError
from esmeray.dataset.batches.steps import StepBatches
from esmeray.dataset.packed_batch import TARGETS, PackedBatch
from esmeray.model.device import HostCopy
from esmeray.monitoring.sampling.memory_meter import MemoryMeter
from esmeray.run_folder.checkpoints import Position
from esmeray.training.engine import memory_guard
from esmeray.training.engine.memory_guard import MemoryGuard
from esmeray.training.engine.step_clock import StepClock
from esmeray.training.loop.stepping import BatchCopies, Stepper, every_step
from tests.model.support import batch_of_lengths, masked_batch, no_waiting, random_sequences


def batch_of(*lengths: int) -> PackedBatch:
    batch = batch_of_lengths(lengths)
    return batch.adding({TARGETS: batch.tokens})


def step_of(*batches: PackedBatch) -> StepBatches:
    return StepBatches(list(batches), 0, 0, 0, 1, num_tokens=0, num_targets=0, seeds=[0] * len(batches))


class Engine:
    """An engine that runs out of memory above a number of tokens, set for each pass."""

    device, can_discard = torch.device("cpu"), True

    module = None  # no model with a loss over a whole step

    world_size = 1

    def __init__(self, forward_fits=1000, backward_fits=1000):
        self.forward_fits, self.backward_fits = forward_fits, backward_fits

    def time_collectives(self, clock, before):
        pass

    def __call__(self, batch):
        if batch.num_tokens > self.forward_fits:
            raise torch.OutOfMemoryError("forward")
        metrics = {"loss": torch.tensor(batch.num_tokens)}
        return SimpleNamespace(loss_sum=SimpleNamespace(tokens=batch.num_tokens), metrics=metrics)

    def backward(self, loss_sum, global_targets):
        if loss_sum.tokens > self.backward_fits:
            raise torch.OutOfMemoryError("backward")

    def discard_gradients(self):
        pass


def stepper_of(engine, folder) -> Stepper:
    meter = MemoryMeter(torch.device("cpu"))
    guard = MemoryGuard(meter, folder / "guard.json", lambda message, parts: None)
    return Stepper(engine, ControlGroup(), StepClock(), guard)


STEP = step_of(batch_of(3, 5, 4, 4), batch_of(8, 8))


def test_run_ends_if_the_smallest_micro_batch_is_out_of_memory(process_group, tmp_path, monkeypatch):
    for engine in (Engine(forward_fits=10), Engine(backward_fits=10)):
        with pytest.raises(ResourceError, match="single sequence of 16 tokens"):
            stepper_of(engine, tmp_path).forward_backward(step_of(batch_of(16)), 16)
    monkeypatch.setattr(memory_guard, "MAX_HALVINGS", 1)
    with pytest.raises(ResourceError, match="even with batches split into 2 micro-batches"):
        stepper_of(Engine(forward_fits=3), tmp_path).forward_backward(STEP, 32)


def test_other_errors_are_not_taken_for_memory(tmp_path):
    engine = Engine()
    engine.backward = lambda *arguments: (_ for _ in ()).throw(RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes"):
        stepper_of(engine, tmp_path).forward_backward(STEP, 32)


def test_steps_resume_inside_their_epoch_and_end_without_records():
    epochs = SimpleNamespace(epoch=lambda number, start, first: ((number, step, first) for step in range(start, 3)))
    position = Position(step=5, epoch=1, step_in_epoch=2)
    assert list(islice(every_step(epochs, position), 5)) == [(1, 2, 3), (2, 0, 6), (2, 1, 6), (2, 2, 6), (3, 0, 9)]
    with pytest.raises(DataError, match="no training records"):
        next(every_step(SimpleNamespace(epoch=lambda *place: iter(())), Position()))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
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
