"""A replica more where tokens wait, one fewer where nothing is asked."""

from types import SimpleNamespace

import pytest

from esmeray.service.replicas.replica import by_queued_tokens


@pytest.mark.parametrize(
    ("behind", "requests", "replicas", "wanted"),
    [
        ([1.1], 1, 1, 2),
        ([1.0], 900, 1, 1),  # many requests of few tokens
        ([1.1, 0], 2, 2, 2),
        ([9.0] * 3, 9, 3, 3),  # the most
        ([0, 0], 0, 2, 1),
        ([0], 0, 1, 1),  # the least
    ],
)
def test_replicas_follow_the_tokens_that_wait(behind: list[float], requests: int, replicas: int, wanted: int):
    context = SimpleNamespace(
        aggregated_metrics={"behind": dict(enumerate(behind))},
        current_num_replicas=replicas,
        total_num_requests=requests,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=3,
    )
    assert by_queued_tokens(context) == (wanted, {})
