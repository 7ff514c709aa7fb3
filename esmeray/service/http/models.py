"""Served models and indexes as the ingress reaches them: which there are, results of sequences, and their neighbours.

A call whose replica was lost is tried once more, with another.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from esmeray.service.contract import About, AboutIndex, Reply
from esmeray.service.http.door import overloaded
from esmeray.service.http.metrics import Metrics
from esmeray.service.http.refusals import RefusalError

Result = TypeVar("Result")
RETRY_S = 2
"""After which a caller is asked to come back where no replica answered."""


class Call(NamedTuple):
    """Methods of a model as coroutines."""

    about: Callable[[], Awaitable[About]]
    run: Callable[[str, Sequence[Any], str], Awaitable[Reply]]
    tokens: Callable[[Sequence[str]], Awaitable[list[list[int]]]]


class IndexCall(NamedTuple):
    """Methods of an index as coroutines."""

    about: Callable[[], Awaitable[AboutIndex]]
    run: Callable[[NDArray | Sequence[str], int, str, str], Awaitable[Reply]]


@dataclass
class Models:
    """The models and indexes of the service, by name; the first is the default.

    ``lost`` and ``busy`` are the errors that say that a replica was lost, or that too many requests wait.
    """

    calls: Mapping[str, Call]
    metrics: Metrics
    lost: tuple[type[BaseException], ...] = ()
    busy: tuple[type[BaseException], ...] = ()
    index_calls: Mapping[str, IndexCall] = field(default_factory=dict)
    about: dict[str, About] = field(default_factory=dict)
    about_index: dict[str, AboutIndex] = field(default_factory=dict)
    _loading: asyncio.Task[None] | None = None

    def load(self) -> asyncio.Task[None]:
        """The task that ends when every model is loaded, begun at the first call."""
        # Anew after an attempt that failed, as where replicas were not up: else no request would ever be answered.
        if self._loading is None or (self._loading.done() and not self.about):
            self._loading = asyncio.create_task(self._load())
        return self._loading

    async def _load(self) -> None:
        self.about_index = {name: await self._call(call.about) for name, call in self.index_calls.items()}
        # Last, since it says that all is loaded.
        self.about = {name: await self._call(call.about) for name, call in self.calls.items()}

    async def mismatch(self) -> str:
        """Describe the first index whose vectors are not its model's, as both are now; '' for none."""
        await self._load()
        for index in self.about_index.values():
            space = self.about[index.model].spaces.get(index.output)
            if space != index.space:
                return (
                    f"indexes: {index.name}: its vectors are of {index.space}, those of model {index.model} "
                    f"of {space}; serve the model that made them, and name it as model of the index"
                )
        return ""

    async def unready(self) -> str:
        """Describe the first index that can't be searched now; '' for none."""
        for name, call in self.index_calls.items():
            problem = (await self._call(call.about)).problem
            if problem:
                return f"indexes: {name}: {problem}"
        return ""

    def named(self, name: str | None) -> About:
        """Description of a model, by default of the first; raises RefusalError (404) where there is none."""
        return self.about[_known_name("model", self.calls, name)]

    def index(self, name: str | None) -> AboutIndex:
        """Description of an index, by default of the first; raises RefusalError (404) where there is none."""
        return self.about_index[_known_name("index", self.index_calls, name)]

    async def run(self, model: str, output: str, payloads: Sequence[Any], caller: str) -> NDArray | list[NDArray]:
        """This output of each payload, (N, D) or a list; callers take turns. Raises RefusalError (429, 500, 503)."""
        return (await self._reply(model, self.calls[model].run, output, payloads, caller)).results

    async def search(self, about: AboutIndex, texts: Sequence[str], top_k: int, caller: str) -> Reply:
        """The neighbours of each text, by scores and ids. Raises RefusalError (429, 500, 503)."""
        embedded = await self._reply(about.model, self.calls[about.model].run, about.output, texts, caller)
        search = self.index_calls[about.name].run
        return await self._reply(about.name, search, embedded.results, top_k, embedded.space, caller)

    async def search_ids(self, about: AboutIndex, ids: Sequence[str], top_k: int, caller: str) -> Reply:
        """The neighbours of proteins of the index itself, by their ids. Raises RefusalError (422) for unknown ones."""
        return await self._reply(about.name, self.index_calls[about.name].run, ids, top_k, about.space, caller)

    async def _reply(self, name: str, run: Callable[..., Awaitable[Reply]], *arguments: Any) -> Reply:
        """The reply of a model or an index that is no refusal."""
        reply = await self._call(run, *arguments)
        self.metrics.of_replica(name, reply.statistics)  # of refusals too: the queue is then of interest most
        if reply.refused == "overloaded":
            # Serve's proxy, which does not know the model of a request, then refuses what is larger.
            raise overloaded(reply.retry_after_s, reply.room_tokens if list(self.calls) == [name] else None)
        if reply.refused == "unavailable":
            raise RefusalError(503, f"{name}: {reply.detail}", RETRY_S)
        if reply.refused == "unknown":
            raise RefusalError(422, f"record {reply.detail}: index {name} has no such id", record=reply.detail)
        if reply.refused:  # NaN or infinity of the model: the request is not at fault
            raise RefusalError(500, reply.detail)
        return reply

    async def tokens(self, model: str, texts: Sequence[str]) -> list[list[int]]:
        return await self._call(self.calls[model].tokens, texts)

    async def _call(self, method: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
        # Twice: results depend on nothing but the request, so it may be computed again; more would add to an outage.
        for _ in range(2):
            try:
                return await method(*arguments)
            except self.busy as error:
                raise RefusalError(429, "too many requests are waiting; try again later", RETRY_S) from error
            except self.lost:
                self.metrics.replicas_lost.inc()
        raise RefusalError(503, "the model's process was lost and is being replaced; try again", RETRY_S)


def _known_name(kind: str, calls: Mapping[str, Any], name: str | None) -> str:
    known = list(calls)
    if not known or (name is not None and name not in known):
        raise RefusalError(
            404,
            f"no such {kind}; there are {', '.join(known) or 'none'} (GET /v1/models)",
            param=kind,
            code=f"{kind}_not_found",
        )
    return name or known[0]
