"""Number of a model's replicas, by the tokens that wait for them: requests say nothing about work (one residue each, or
200,000)."""

from typing import Any

SCALE_UP_TOKENS = 50_000
"""Waiting tokens of each replica beyond which another is started."""


def by_queued_tokens(context: Any) -> tuple[int, dict[str, Any]]:
    """Serve's policy: one replica more where many tokens wait, one fewer where nothing is asked."""
    queued = (context.aggregated_metrics or {}).get("queued_tokens", {})
    current = context.current_num_replicas
    wanted = current
    if sum(queued.values()) > SCALE_UP_TOKENS * max(1, current):
        wanted = current + 1
    elif context.total_num_requests < 1:
        wanted = current - 1
    least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
    return max(least, min(most, wanted)), {}
