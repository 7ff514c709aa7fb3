"""Packing plans each record once within the budget, nearly fills it, shuffles, and is independent of the workers."""

from dataclasses import replace
from pathlib import Path

import dnaio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.common.errors import DataError
from esmeray.dataset.batches.plan import EpochPlan, Groups, micro_batches, plan_epoch

BUDGET = 1024

lengths = st.lists(st.integers(2, BUDGET), max_size=300).map(lambda values: np.array(values, dtype=np.int64))
plans = st.builds(
    plan_epoch,
    lengths,
    st.just(BUDGET),
    st.integers(1, 200),
    st.integers(0, 2**40),
    st.integers(0, 50),
    batches_per_step=st.integers(1, 7),
)


@pytest.fixture(scope="module")
def uniref_tokens(shared_data: Path) -> np.ndarray:
    with dnaio.open(shared_data / "uniref90_10k.fasta.gz") as records:
        return np.array([min(len(record.sequence), 1022) + 2 for record in records])


def batch_tokens(plan: EpochPlan, lengths_N: np.ndarray) -> np.ndarray:
    return np.add.reduceat(lengths_N[plan.records], plan.offsets[:-1])


@settings(deadline=None, max_examples=40)
@given(
    lengths_N=lengths,
    window=st.integers(1, 200),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 50),
    most=st.none() | st.integers(1, 30),
)
def test_every_record_stands_in_exactly_one_batch_within_the_budget(lengths_N, window, seed, epoch, most):
    plan = plan_epoch(lengths_N, BUDGET, window, seed, epoch, max_sequences=most)
    assert sorted(plan.records.tolist()) == list(range(lengths_N.size))
    assert plan.offsets[0] == 0
    assert plan.offsets[-1] == lengths_N.size
    sizes = np.diff(plan.offsets)
    assert ((sizes > 0) & (sizes <= (most or lengths_N.size))).all()
    if lengths_N.size:
        assert batch_tokens(plan, lengths_N).max() <= BUDGET


@settings(deadline=None, max_examples=40)
@given(lengths_N=lengths, groups=st.integers(1, 40), members=st.integers(2, 9), seed=st.integers(0, 2**40))
def test_members_of_a_group_stand_side_by_side_and_every_record_once(lengths_N, groups, members, seed):
    ids_N = np.random.default_rng(seed).integers(0, groups, lengths_N.size)
    plan = plan_epoch(lengths_N, BUDGET, 1, seed, 0, groups=Groups(ids_N, members))
    assert sorted(plan.records.tolist()) == list(range(lengths_N.size))
    # Sets of as many members as are wanted, and one smaller set of each group: no more changes of group than sets.
    sets = sum(-(-np.count_nonzero(ids_N == group) // members) for group in range(groups))
    assert np.count_nonzero(np.diff(ids_N[plan.records])) <= max(sets - 1, 0)
    if lengths_N.size:
        assert batch_tokens(plan, lengths_N).max() <= BUDGET


@settings(deadline=None, max_examples=40)
@given(plan=plans, ramp=st.lists(st.integers(1, 9), max_size=6), world_size=st.integers(1, 4))
def test_steps_have_as_many_batches_as_planned_on_every_rank(plan, ramp, world_size):
    ramped = replace(plan, ramp=np.cumsum([0, *ramp], dtype=np.int64))
    sizes = [*ramp, *[plan.batches_per_step] * plan.num_batches]
    taken = []
    for step in range(ramped.num_steps):
        ranks = [ramped.rank_batches(step, rank, world_size) for rank in range(world_size)]
        assert all(None not in batches[: sum(batch is not None for batch in batches)] for batches in ranks)
        assert {len(batches) for batches in ranks} == {micro_batches(sizes[step], world_size)}
        batches = sorted(batch for rank in ranks for batch in rank if batch is not None)
        assert len(batches) == sizes[step] or step + 1 == ramped.num_steps
        taken += batches
    assert taken == list(range(plan.num_batches))


def test_record_longer_than_the_budget_is_refused_by_number():
    with pytest.raises(DataError, match=r"record 42 has 101.*only 100 \(2 records too long\): raise batch\.tokens"):
        plan_epoch(np.array([5, 101, 300]), 100, 10, 0, 0, records=np.array([1, 42, 43]))


@pytest.mark.parametrize(("budget", "window", "copies"), [(4096, 2048, 1), (8192, 2048, 1), (32768, 1, 5)])
def test_real_proteins_fill_98_percent_of_the_budget_also_by_small_windows(uniref_tokens, budget, window, copies):
    tokens = np.tile(uniref_tokens, copies)
    assert batch_tokens(plan_epoch(tokens, budget, window, 0, 0), tokens).mean() >= 0.98 * budget


def test_what_shares_a_batch_is_nearly_random(uniref_tokens):
    plan = plan_epoch(uniref_tokens, 8192, 2048, 0, 0)
    sizes = np.diff(plan.offsets)[:-1]
    means = (batch_tokens(plan, uniref_tokens) / np.diff(plan.offsets))[:-1]
    # The expected spread of batch means for random draws; sorting by length would give five times this value.
    assert means.std() < 1.5 * uniref_tokens.std() / np.sqrt(sizes.mean())
    assert abs(np.corrcoef(np.arange(means.size), means)[0, 1]) < 0.2
    assert abs(np.corrcoef(np.arange(plan.records.size), plan.records)[0, 1]) < 0.05
