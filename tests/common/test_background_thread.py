import threading
from functools import partial

import pytest

from esmeray.common.background_thread import BackgroundThread


@pytest.fixture
def thread():
    thread: BackgroundThread[int] = BackgroundThread()
    yield thread
    thread.close()


def test_what_a_task_raises_is_raised_by_the_next_call(thread):
    thread.begin(partial(int, "x"))
    with pytest.raises(ValueError, match="invalid literal"):
        thread.begin(partial(int, "1"))
    with pytest.raises(ValueError, match="invalid literal"):
        thread.wait()


def test_closing_waits_for_the_task_and_can_be_repeated(thread):
    may_go, done = threading.Event(), []
    thread.begin(lambda: done.append(0))
    thread.begin(lambda: may_go.wait(30) and done.append(1))
    threading.Timer(0.05, may_go.set).start()
    thread.close()
    thread.close()
    assert done == [0, 1]
