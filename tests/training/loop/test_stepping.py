from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from esmeray.common.errors import DataError, ResourceError
from esmeray.dataset.batches.steps import StepBatches
from esmeray.dataset.packed_batch import TARGETS, PackedBatch
from esmeray.model.device import HostCopy
from esmeray.monitoring.sampling.memory_meter import MemoryMeter
from esmeray.run_folder.checkpoints import Position
from esmeray.training.engine import memory_guard
from esmeray.training.engine.memory_guard import MemoryGuard, NewStartError
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

    def __init__(self, forward_fits=1000, backward_fits=1000, world_size=1, reduces="never"):
        self.forward_fits, self.backward_fits, self.world_size = forward_fits, backward_fits, world_size
        self.reduces = reduces
        self.passes, self.collectives = [], 0

    def time_collectives(self, clock, before):
        self.before = before

    def all_reduce(self):
        self.before()
        self.collectives += 1

    def __call__(self, batch):
        if batch.num_tokens > self.forward_fits:
            raise torch.OutOfMemoryError("forward")
        metrics = {"loss": torch.tensor(batch.num_tokens)}
        return SimpleNamespace(loss_sum=SimpleNamespace(tokens=batch.num_tokens), metrics=metrics)

    def backward(self, loss_sum, global_targets):
        if self.reduces == "early":
            self.all_reduce()
        if loss_sum.tokens > self.backward_fits:
            raise torch.OutOfMemoryError("backward")
        if self.reduces in ("early", "late"):
            self.all_reduce()
        self.passes.append(loss_sum.tokens)

    def discard_gradients(self):
        self.passes = []


class Others:
    """A control group whose other worker reports out of memory at some of the calls."""

    def __init__(self, *runs_out: int):
        self.runs_out, self.asked = runs_out, 0

    def any_out_of_memory(self, here, tokens):
        self.asked += 1
        return here or self.asked in self.runs_out, tokens


def stepper_of(engine, folder, control=None) -> Stepper:
    meter = MemoryMeter(torch.device("cpu"))
    guard = MemoryGuard(meter, folder / "guard.json", lambda message, parts: None)
    return Stepper(engine, control or Others(), StepClock(), guard)


STEP = step_of(batch_of(3, 5, 4, 4), batch_of(8, 8))


@pytest.mark.parametrize("reduces", ["never", "late", "early"])
@pytest.mark.parametrize("runs_out", [1, 2])
def test_worker_with_memory_enough_splits_as_the_others_do(reduces, runs_out, tmp_path):
    engine, others = Engine(world_size=2, reduces=reduces), Others(runs_out)
    sums = stepper_of(engine, tmp_path, others).forward_backward(step_of(batch_of(8, 8), batch_of(16)), 32)
    assert engine.passes[-2:] == [16, 16]  # as many passes as the other workers, with one empty batch
    if reduces != "never" or runs_out == 1:
        assert engine.passes == [8, 8, 16, 16]
        assert float(sums.own["loss"]) == 3 * 16  # real models have no loss for a batch without targets


def test_no_collective_is_joined_where_another_worker_ran_out(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_guard, "MAX_HALVINGS", 0)
    engine = Engine(world_size=2, reduces="early")
    stepper = stepper_of(engine, tmp_path, Others(1))
    with pytest.raises(ResourceError):
        stepper.forward_backward(STEP, 32)
    assert engine.collectives == 0


def test_run_ends_if_the_smallest_micro_batch_is_out_of_memory(tmp_path, monkeypatch):
    for engine in (Engine(forward_fits=10), Engine(backward_fits=10)):
        with pytest.raises(ResourceError, match="single sequence of 16 tokens"):
            stepper_of(engine, tmp_path).forward_backward(step_of(batch_of(16)), 16)
    monkeypatch.setattr(memory_guard, "MAX_HALVINGS", 1)
    with pytest.raises(ResourceError, match="even with batches split into 2 micro-batches"):
        stepper_of(Engine(forward_fits=3), tmp_path).forward_backward(STEP, 32)


def test_workers_restart_if_a_backward_pass_failed_after_a_collective(tmp_path):
    engine = Engine(backward_fits=10, world_size=2, reduces="early")
    with pytest.raises(NewStartError, match="last checkpoint, with every batch split into 2 micro-batches"):
        stepper_of(engine, tmp_path).forward_backward(STEP, 32)
    assert '"parts": 2' in (tmp_path / "guard.json").read_text()


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
