"""Replica of a model on Ray Serve: batches across requests, computed in a thread.

In: calls with many sequences, from the ingress. Out: a :class:`~service.contract.Reply`; refusals are values, since Ray
wraps errors.
"""

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import psutil

from common.errors import DataError, ResourceError
from service.contract import About, Reply
from service.replicas.batcher import OverloadedError, TokenBatcher
from train_config.service_schema import ServedModel

log = logging.getLogger("esmeray.service")

WARM_UP_LENGTHS = (20, 100, 400)
WARM_UP_LETTERS = "LAGVSERTIDPKQNFYMHWC"


class ModelReplica:
    """The deployment of one model.

    Args:
        model: settings.
        device: cpu or cuda.
        version: of the weights' files; another one makes Serve replace the replicas, one after the other.
    """

    def __init__(self, model: dict[str, Any], device: str, version: str) -> None:
        import torch  # here: the process that deploys the replicas, which imports this module, needs none

        from service.process import set_up_process
        from service.replicas.computer import Computer

        self._batcher: TokenBatcher | None = None
        set_up_process()
        self._model, start_s = ServedModel(**model), time.perf_counter()
        torch.set_num_threads(self._model.cpus)
        self._computer, self._device = Computer(self._model, device), device
        loaded_s = time.perf_counter()
        self._warm_up()
        log.info(
            "%s: loaded in %.1f s, warmed up in %.1f s, version %s",
            *(self._model.name, loaded_s - start_s, time.perf_counter() - loaded_s, version),
        )

    async def about(self) -> About:
        return self._computer.about

    async def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._computer.tokens(text) for text in texts]

    async def run(self, output: str, payloads: Sequence[Any]) -> Reply:
        """This output of each text, or of latents."""
        if self._batcher is None:
            about = self._computer.about
            self._batcher = TokenBatcher(
                self._computer.compute,
                budget=about.tokens,
                max_wait_s=self._model.max_wait_ms / 1e3,
                queue_tokens=self._model.queue_tokens,
                cache_bytes=self._model.cache_mb * 1_000_000,
                at_once=2 if self._device == "cuda" else 1,
            )
        try:
            results = await self._batcher.submit(self._computer.items(output, payloads))
        except OverloadedError as error:
            return Reply(refused="overloaded", retry_after_s=error.retry_after_s, statistics=self._statistics())
        except ResourceError as error:
            return Reply(refused="memory", detail=str(error), statistics=self._statistics())
        except DataError as error:
            return Reply(refused="model", detail=str(error), statistics=self._statistics())
        one_vector_each = all(result.ndim == 1 for result in results)
        return Reply(np.stack(results) if one_vector_each else results, statistics=self._statistics())

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Tokens that wait, which :func:`service.replicas.autoscaling.by_queued_tokens` looks at."""
        return {"queued_tokens": float(self._batcher.queued_tokens if self._batcher else 0)}

    async def __del__(self) -> None:
        if self._batcher is not None:
            await self._batcher.drain()

    def _warm_up(self) -> None:
        """Compile what is compiled at first use; computing is slower until then."""
        about = self._computer.about
        output = next(iter(about.outputs))
        texts = [(WARM_UP_LETTERS * 50)[:length] for length in WARM_UP_LENGTHS]
        items = self._computer.items(output, texts)
        for batch in (items[:1], items[1:], items):
            self._computer.compute(batch)

    def _statistics(self) -> dict[str, float | str]:
        import torch

        batcher = self._batcher
        assert batcher is not None
        memory = torch.cuda.memory_allocated() if self._device == "cuda" else psutil.Process().memory_info().rss
        statistics: dict[str, float | str] = {"replica": str(os.getpid()), "memory_bytes": float(memory)}
        return statistics | asdict(batcher.totals) | {"queued_tokens": float(batcher.queued_tokens)}
