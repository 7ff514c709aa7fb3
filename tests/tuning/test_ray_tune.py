"""The search as Ray Tune sees it."""

import os
import pickle

from tests.tuning.test_search import a_space, settings_for
from tuning.ray_tune import SearchAlgorithm
from tuning.search import Search


def test_search_that_shows_its_progress_on_a_terminal_is_kept_by_ray_tune():
    search = Search(a_space(), settings_for())
    leader, follower = os.openpty()
    with os.fdopen(leader, "rb"), os.fdopen(follower, "w") as terminal:
        algorithm = SearchAlgorithm(search, [], asked=lambda _: terminal.write("asked"), measured=print)
        pickle.dumps(algorithm)
        asked = algorithm.suggest("1")
    assert asked["settings"]["tokens"] == search.space.default.tokens
    assert asked["to_beat"] is None
