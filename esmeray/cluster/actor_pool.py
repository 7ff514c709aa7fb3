"""Tasks computed by actors of a Ray cluster, one a device. A task whose actor was lost goes to another.

In: a class with ``load()`` and ``run(task)``, and tasks. Out: what ``run`` returns, as tasks are done. Actors write
their results themselves, so that nothing large passes through Ray.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from esmeray.cluster.connection import worker_environment
from esmeray.common.errors import EsmerayError, ResourceError
from esmeray.common.text import first_line


class ActorPool:
    """Actors that compute tasks. Ray is connected already. To be closed.

    Args:
        kind: class of the actors; raises what it raises in ``load``, since what a constructor raises reaches nobody.
        options: of each actor, as ``num_cpus``.
        at_once: tasks of an actor.
        max_failures: times that a task may lose its actor.
        ended: when it is set, no task is begun and nothing is waited for any more.
        same: given what two actors' ``load`` returned, raises where they can't work together.

    ``loaded`` is what the first actor's ``load`` returned. Raises ResourceError where actors end before they are
    loaded, or what an actor refused.
    """

    def __init__(
        self,
        kind: type,
        argument: Any,
        count: int,
        options: dict[str, Any],
        *,
        at_once: int,
        max_failures: int,
        log: logging.Logger,
        ended: threading.Event | None = None,
        same: Callable[[Any, Any], None] = lambda first, other: None,
    ) -> None:
        settings = {**options, "max_concurrency": at_once, "runtime_env": worker_environment()}
        self._kind: Any = ray.remote(**settings)(kind)
        self._argument = argument
        self._at_once, self._max_failures, self._not_loaded, self._same = at_once, max_failures, 0, same
        self._log, self._ended = log, ended or threading.Event()
        self._waiting: dict[Any, tuple[Any, int | None]] = {}
        self._lost: set[Any] = set()
        self._ready: list[Any] = []
        for _ in range(count):
            self._start()
        self.loaded = self._first_loaded()

    def run(self, tasks: Sequence[Any]) -> Iterator[Any]:
        """Results as they are done. Raises ResourceError where a task lost its actor too often."""
        todo = deque(range(len(tasks)))
        tries = Counter[int]()
        left = len(tasks)
        # An actor once for each task that it takes at a time, of those that are loaded already.
        idle = [actor for actor in self._ready for _ in range(self._at_once)]
        while left and not self._ended.is_set():
            while idle and todo:
                actor = idle.pop()
                # One that was lost may be there still, once for each of its tasks.
                if actor not in self._lost:
                    following = todo.popleft()
                    self._waiting[actor.run.remote(tasks[following])] = actor, following
            for actor, number, result in self._replies():
                if isinstance(result, RayActorError):
                    if number is not None:
                        todo.appendleft(number)  # it has waited longest
                        tries[number] += 1
                        if tries[number] > self._max_failures:
                            raise ResourceError(
                                f"task {number} of {len(tasks)} lost its worker {tries[number]} times ({result}); "
                                "lower the token budget, or look into Ray's logs"
                            )
                    # An actor that was lost at a task had loaded.
                    self._replace(actor, number is not None, result)
                elif number is None:
                    self._same(self.loaded, result)
                    self._ready.append(actor)  # for the next run, too
                    idle += [actor] * self._at_once
                else:
                    left -= 1
                    idle.append(actor)
                    yield result

    def close(self) -> None:
        for actor in {*self._ready, *(actor for actor, _ in self._waiting.values())}:
            ray.kill(actor)

    def _start(self) -> None:
        actor = self._kind.remote(self._argument)
        self._waiting[actor.load.remote()] = actor, None

    def _first_loaded(self) -> Any:
        """Wait for one actor; the others join as they are ready."""
        while not self._ended.is_set():
            for actor, _, result in self._replies():
                if not isinstance(result, RayActorError):
                    self._ready.append(actor)
                    return result
                self._replace(actor, False, result)
        return None

    def _replies(self) -> Iterator[tuple[Any, int | None, Any]]:
        # In turns of a second, so that ``ended`` is heard.
        done, _ = ray.wait(list(self._waiting), timeout=1.0)
        for reference in done:
            actor, number = self._waiting.pop(reference)
            try:
                yield actor, number, ray.get(reference)
            except RayTaskError as error:
                if isinstance(error.cause, EsmerayError):
                    raise error.cause from None
                raise
            except RayActorError as error:
                yield actor, number, error

    def _replace(self, actor: Any, was_loaded: bool, error: RayActorError) -> None:
        if actor in self._lost:  # each of its tasks brings the news
            return
        self._lost.add(actor)
        reason = first_line(error)
        # Actors that end before they are loaded would do so for ever: those that have worked are limited by task.
        self._not_loaded = 0 if was_loaded else self._not_loaded + 1
        if self._not_loaded > self._max_failures:
            raise ResourceError(f"workers end before the model is loaded ({reason}); give them more memory")
        self._log.warning("a worker was lost and is replaced: %s", reason)
        self._start()
