"""Pool of Ray actors that compute tasks, one actor per device. If an actor is lost, another one repeats its tasks.

The pool takes a class with ``load()`` and ``run(task)``, and tasks. It yields the return values of ``run`` in the order
of completion. Actors write their results themselves, so that no large data passes through Ray.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from esmeray.cluster.connection import worker_environment
from esmeray.common.errors import EsmerayError, ResourceError, first_line


class ActorPool:
    """Actors that compute tasks. Ray must be connected, and the pool must be closed.

    Args:
        kind: class of the actors. It raises errors in ``load``, because errors of a constructor are not received.
        argument: argument of the class.
        count: number of actors.
        options: Ray's options of each actor, e.g. ``num_cpus``.
        at_once: number of concurrent tasks per actor.
        max_failures: number of times that a task may lose its actor.
        log: logger for lost actors.
        ended: event that stops the pool: no task starts, and waiting ends.
        same: function that takes the return values of two actors' ``load`` and raises if they can't work together.

    ``loaded`` is the return value of the first actor's ``load``. Raises ResourceError if actors end before they are
    loaded, and any EsmerayError that an actor raises.
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
        """Yield results in the order of completion. Raises ResourceError if a task lost its actor too often."""
        todo = deque(range(len(tasks)))
        tries = Counter[int]()
        left = len(tasks)
        # Each loaded actor is listed once per concurrent task.
        idle = [actor for actor in self._ready for _ in range(self._at_once)]
        while left and not self._ended.is_set():
            while idle and todo:
                actor = idle.pop()
                # A lost actor may still be listed, once per concurrent task.
                if actor not in self._lost:
                    following = todo.popleft()
                    self._waiting[actor.run.remote(tasks[following])] = actor, following
            for actor, number, result in self._replies():
                if isinstance(result, RayActorError):
                    if number is not None:
                        todo.appendleft(number)  # first in line, because it has waited longest
                        tries[number] += 1
                        if tries[number] > self._max_failures:
                            raise ResourceError(
                                f"task {number} of {len(tasks)} lost its worker {tries[number]} times "
                                f"({result}); lower the token budget, or check Ray's logs"
                            )
                    # An actor that was lost during a task had loaded.
                    self._replace(actor, number is not None, result)
                elif number is None:
                    self._same(self.loaded, result)
                    self._ready.append(actor)  # also available to the next call of run
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
        """Wait until one actor is loaded. The others join when they are ready."""
        while not self._ended.is_set():
            for actor, _, result in self._replies():
                if not isinstance(result, RayActorError):
                    self._ready.append(actor)
                    return result
                self._replace(actor, False, result)
        return None

    def _replies(self) -> Iterator[tuple[Any, int | None, Any]]:
        # Wait for at most a second, so that ``ended`` is checked.
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
        if actor in self._lost:  # each of its tasks reports the loss
            return
        self._lost.add(actor)
        reason = first_line(error)
        # Limit the actors that end before they are loaded: they would be replaced forever. Other losses are limited by
        # the failures of a task.
        self._not_loaded = 0 if was_loaded else self._not_loaded + 1
        if self._not_loaded > self._max_failures:
            raise ResourceError(f"workers die before the model is loaded ({reason}); give them more memory")
        self._log.warning("a worker died and is being replaced: %s", reason)
        self._start()
