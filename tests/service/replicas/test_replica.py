"""A replica more where tokens wait, one fewer where nothing is asked."""

from types import SimpleNamespace

import pytest

from service.replicas.replica import SCALE_UP_TOKENS, by_queued_tokens


@pytest.mark.parametrize(
    ("queued", "requests", "replicas", "wanted"),
    [
        ([SCALE_UP_TOKENS + 1], 1, 1, 2),
        ([SCALE_UP_TOKENS], 900, 1, 1),  # many requests of few tokens
        ([SCALE_UP_TOKENS + 1, 0], 2, 2, 2),
        ([9 * SCALE_UP_TOKENS] * 3, 9, 3, 3),  # the most
        ([0, 0], 0, 2, 1),
        ([0], 0, 1, 1),  # the least
    ],
)
def test_replicas_follow_the_tokens_that_wait(queued: list[int], requests: int, replicas: int, wanted: int):
    context = SimpleNamespace(
        aggregated_metrics={"queued_tokens": dict(enumerate(queued))},
        current_num_replicas=replicas,
        total_num_requests=requests,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=3,
    )
    assert by_queued_tokens(context) == (wanted, {})
