"""Served models and indexes as seen by the ingress: descriptions, results for sequences, and neighbours.

A call whose replica was lost is repeated once, by another replica.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from numpy.typing import NDArray

from esmeray.service.contract import DESIGNS, About, AboutIndex, Reply
from esmeray.service.http.door import overloaded
from esmeray.service.http.metrics import Metrics
from esmeray.service.http.refusals import RefusalError

Result = TypeVar("Result")
RETRY_S = 2
"""Retry-After in seconds if no replica answered."""


class Call(NamedTuple):
    """Methods of a served model or index, as coroutines. An index has no ``tokens``."""

    about: Callable[[], Awaitable[Any]]
    run: Callable[..., Awaitable[Reply]]
    tokens: Any = None


@dataclass
class Models:
    """Models and indexes of the service by name. The first of each is the default.

    Attributes:
        lost: errors of a call whose replica was lost.
        busy: errors of a call that was refused because too many are waiting.
    """

    calls: Mapping[str, Call]
    lost: tuple[type[BaseException], ...] = ()
    busy: tuple[type[BaseException], ...] = ()
    index_calls: Mapping[str, Call] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=Metrics)
    about: dict[str, About] = field(default_factory=dict)
    about_index: dict[str, AboutIndex] = field(default_factory=dict)
    _loading: asyncio.Task[None] | None = None

    def load(self) -> asyncio.Task[None]:
        """Return the task that ends when every model is loaded. The first call starts it."""
        # Start again after a failure, e.g. if replicas were not up. Otherwise no request would ever be answered.
        if self._loading is None or (self._loading.done() and not self.about):
            self._loading = asyncio.create_task(self._load())
        return self._loading

    async def _load(self) -> None:
        self.about_index = {name: await self._call(call.about) for name, call in self.index_calls.items()}
        # Last: a non-empty `about` means that everything is loaded.
        self.about = {name: await self._call(call.about) for name, call in self.calls.items()}

    async def mismatch(self) -> str:
        """Describe the first index whose vectors are not of its model, with both as they are now; '' for none."""
        await self._load()
        for index in self.about_index.values():
            space = self.about[index.model].spaces.get(index.output)
            if space != index.space:
                return (
                    f"indexes: {index.name}: its vectors are of {index.space}, but model {index.model} "
                    f"makes vectors of {space}; serve the model that made them, and name it as model of the index"
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
        """Return the description of a model, by default the first. Raises RefusalError (404) for an unknown name."""
        return self.about[_known_name("model", self.calls, name)]

    def index(self, name: str | None) -> AboutIndex:
        """Return the description of an index, by default the first. Raises RefusalError (404) for an unknown name."""
        return self.about_index[_known_name("index", self.index_calls, name)]

    async def run(self, model: str, output: str, payloads: Sequence[Any], caller: str) -> NDArray | list[NDArray]:
        """Return this output of each payload, (N, D) or a list. Raises RefusalError (429, 500, 503)."""
        return (await self._reply(model, self.calls[model].run, output, payloads, caller)).results

    async def search(self, about: AboutIndex, texts: Sequence[str], top_k: int, caller: str) -> Reply:
        """Return the neighbours of each text, as scores and ids. Raises RefusalError (429, 500, 503)."""
        embedded = await self._reply(about.model, self.calls[about.model].run, about.output, texts, caller)
        search = self.index_calls[about.name].run
        return await self._reply(about.name, search, embedded.results, top_k, embedded.space, caller)

    async def search_ids(self, about: AboutIndex, ids: Sequence[str], top_k: int, caller: str) -> Reply:
        """Return the neighbours of proteins in the index, by their ids. Raises RefusalError (422) for unknown ids."""
        return await self._reply(about.name, self.index_calls[about.name].run, ids, top_k, about.space, caller)

    async def _reply(self, name: str, run: Callable[..., Awaitable[Reply]], *arguments: Any) -> Reply:
        """Return the reply of a model or an index. Raises RefusalError if it refused."""
        reply = await self._call(run, *arguments)
        self.metrics.of_replica(name, reply.statistics)  # also from refusals, when the queue matters most
        if reply.refused == "overloaded":
            # Serve's proxy then refuses larger requests. It does not know their model, so only if there is one model.
            raise overloaded(reply.retry_after_s, reply.room_tokens if list(self.calls) == [name] else None)
        if reply.refused == "unavailable":
            raise RefusalError(503, f"{name}: {reply.detail}", RETRY_S)
        if reply.refused == "unknown":
            raise RefusalError(422, f"record {reply.detail}: index {name} has no such id", record=reply.detail)
        if reply.refused:  # the model returned NaN or infinity: the request is not at fault
            raise RefusalError(500, reply.detail)
        return reply

    async def tokens(self, model: str, texts: Sequence[str]) -> list[list[int]]:
        if DESIGNS in self.about[model].outputs:
            raise RefusalError(422, f"model {model} reads structures and has no tokens")
        return await self._call(self.calls[model].tokens, texts)

    async def _call(self, method: Callable[..., Awaitable[Result]], *arguments: Any) -> Result:
        # Twice: a request can safely be computed again. More attempts would add load to an outage.
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
