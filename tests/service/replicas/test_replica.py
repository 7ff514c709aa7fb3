"""Autoscaling adds a replica if tokens wait, and removes one if there are no requests."""

from types import SimpleNamespace

from esmeray.service.replicas.replica import by_queued_tokens


def test_replicas_follow_the_tokens_that_wait():
    for behind, requests, replicas, wanted in [
        ([1.1], 1, 1, 2),
        ([1.0], 900, 1, 1),  # many requests with few tokens
        ([1.1, 0], 2, 2, 2),
        ([9.0] * 3, 9, 3, 3),  # the maximum
        ([0, 0], 0, 2, 1),
        ([0], 0, 1, 1),  # the minimum
    ]:
        context = SimpleNamespace(
            aggregated_metrics={"behind": dict(enumerate(behind))},
            current_num_replicas=replicas,
            total_num_requests=requests,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=3,
        )
        assert by_queued_tokens(context) == (wanted, {})
