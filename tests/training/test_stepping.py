"""The order in which a step's batches are taken, with and without memory enough."""

from types import SimpleNamespace

import pytest
import torch

from dataset.packed_batch import PackedBatch
from dataset.steps import StepBatches
from train_config.errors import ResourceError
from train_config.monitoring_schema import MemoryGuardSection
from training.memory_guard import MemoryGuard, NewStartError
from training.memory_meter import MemoryMeter
from training.step_clock import StepClock
from training.stepping import Stepper


def batch_of(*lengths: int) -> PackedBatch:
    T = sum(lengths)
    return PackedBatch(
        tokens=torch.arange(T),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_seqlen=max(lengths),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        records=torch.arange(len(lengths)),
        targets=torch.arange(T),
    )


def step_of(*batches: PackedBatch) -> StepBatches:
    return StepBatches(list(batches), 0, 0, 0, 1, num_tokens=0, num_targets=0)


class Engine:
    """Has memory for so many tokens in either pass; its gradient is the sum of the tokens it was shown."""

    device, stage = torch.device("cpu"), 2

    def __init__(self, forward_fits=1000, backward_fits=1000, world_size=1):
        self.forward_fits, self.backward_fits, self.world_size = forward_fits, backward_fits, world_size
        self.can_discard = world_size == 1
        self.gradient, self.passes = 0, []

    def time_collectives(self, clock):
        pass

    def __call__(self, batch):
        if batch.num_tokens > self.forward_fits:
            raise torch.OutOfMemoryError("forward")
        loss_sum = SimpleNamespace(total=int(batch.tokens.sum()), tokens=batch.num_tokens)
        return SimpleNamespace(loss_sum=loss_sum, metrics={"loss": batch.tokens.sum()})

    def backward(self, loss_sum, global_targets):
        self.gradient += loss_sum.total  # as far as it gets
        if loss_sum.tokens > self.backward_fits:
            raise torch.OutOfMemoryError("backward")
        self.passes.append(loss_sum.tokens)

    def discard_gradients(self):
        self.gradient, self.passes = 0, []


class Alone:
    """A control group in which nobody else says anything."""

    def ran_out(self, here, tokens):
        return here, tokens


class OtherRunsOut(Alone):
    """Another worker runs out in its first forward pass."""

    said = False

    def ran_out(self, here, tokens):
        first, self.said = not self.said, True
        return here or first, tokens


def stepper_of(engine, folder, control=None, max_halvings=3) -> Stepper:
    meter = MemoryMeter(torch.device("cpu"))
    section = MemoryGuardSection(max_halvings=max_halvings)
    guard = MemoryGuard(section, meter, folder / "guard.json", lambda message, parts: None)
    return Stepper(engine, control or Alone(), StepClock(1), guard)


STEP = step_of(batch_of(3, 5, 4, 4), batch_of(8, 8))
TOTAL = 2 * sum(range(16))


@pytest.mark.parametrize(
    ("engine", "passes"),
    [
        (Engine(), [16, 16]),
        (Engine(forward_fits=10), [8, 8, 8, 8]),
        (Engine(forward_fits=8, backward_fits=8), [8, 8, 8, 8]),
        (Engine(backward_fits=10), [8, 8, 8, 8]),
    ],
    ids=["enough", "forward", "exactly enough", "backward"],
)
def test_gradient_and_sums_are_those_of_whole_batches(engine, passes, tmp_path):
    sums = stepper_of(engine, tmp_path).forward_backward(STEP, 32)
    assert engine.passes == passes
    assert engine.gradient == TOTAL
    assert float(sums._sums["loss"]) == TOTAL


def test_later_batches_are_taken_in_parts_without_being_tried_whole(tmp_path):
    engine = Engine(forward_fits=10)
    stepper = stepper_of(engine, tmp_path)
    stepper.forward_backward(STEP, 32)
    engine.forward_fits, engine.passes = 1000, []
    stepper.forward_backward(STEP, 32)
    assert engine.passes == [8, 8, 8, 8]


def test_worker_with_memory_enough_splits_as_the_others_do(tmp_path):
    engine = Engine(world_size=2)
    sums = stepper_of(engine, tmp_path, OtherRunsOut()).forward_backward(step_of(batch_of(8, 8), batch_of(16)), 32)
    assert len(engine.passes) == 4  # as many as the others take, with one that counts for nothing
    assert engine.passes == [8, 8, 16, 16]
    assert float(sums._sums["loss"]) == TOTAL + sum(range(16))  # the stand-in's loss has no targets in a real model


@pytest.mark.parametrize("where", ["forward_fits", "backward_fits"])
def test_single_sequence_that_does_not_fit_is_refused_by_its_length(where, tmp_path):
    engine = Engine(**{where: 10})
    with pytest.raises(ResourceError, match="single sequence of 16 tokens"):
        stepper_of(engine, tmp_path).forward_backward(step_of(batch_of(16)), 16)


def test_several_workers_start_anew_where_a_backward_pass_broke_off(tmp_path):
    with pytest.raises(NewStartError, match="last checkpoint, with every batch in 2 parts"):
        stepper_of(Engine(backward_fits=10, world_size=2), tmp_path).forward_backward(STEP, 32)
    assert '"parts": 2' in (tmp_path / "guard.json").read_text()


def test_used_up_halvings_end_it(tmp_path):
    with pytest.raises(ResourceError, match="also with batches in 2 parts"):
        stepper_of(Engine(forward_fits=3), tmp_path, max_halvings=1).forward_backward(STEP, 32)


def test_other_errors_are_not_taken_for_memory(tmp_path):
    engine = Engine()
    engine.backward = lambda *arguments: (_ for _ in ()).throw(RuntimeError("shapes do not fit"))
    with pytest.raises(RuntimeError, match="shapes"):
        stepper_of(engine, tmp_path).forward_backward(STEP, 32)


def test_without_a_guard_running_out_is_raised():
    with pytest.raises(torch.OutOfMemoryError):
        Stepper(Engine(forward_fits=1), Alone(), StepClock(1)).forward_backward(STEP, 32)
