"""Computer of a model that designs: sequences for backbone structures, with their scores."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from esmeray.common.errors import ConfigError
from esmeray.inference.design.calls import open_designer
from esmeray.inference.design.sampling import Request, generate, log_likelihoods, recovery, weights_notes
from esmeray.model.backbones.fingerprint import weights_fingerprint
from esmeray.service.contract import DESIGNS, About, DesignOrder
from esmeray.service.replicas.batcher import Item
from esmeray.service.section import ServedModel
from esmeray.train_config.section import ComputeSection


class DesignComputer:
    """Served designer on a device; see :class:`~esmeray.service.replicas.computer.Computer`."""

    def __init__(self, served: ServedModel, device: str) -> None:
        if served.precision not in (None, "fp32"):
            raise ConfigError(f"models: {served.source}: designs are computed in fp32; remove precision")
        for name in ("random_weights", "equal_bytes", "cache"):
            if getattr(served, name):
                raise ConfigError(f"models: {served.source}: {name} has no effect on designs; remove it")
        _, tokens = ComputeSection(precision="fp32", tokens=served.tokens).resolved(device == "cuda")
        self._designer = open_designer(served.source, device)
        self.about = About(
            name=served.name,
            outputs={DESIGNS: 1},
            vocabulary=(),
            labels=(),
            label_kind="",
            one_token_per_residue=True,
            longest=None,
            fingerprint=weights_fingerprint(self._designer.network),
            device=device,
            precision="fp32",
            tokens=tokens,
            random_weights=False,
            spaces={},
            notes=tuple(weights_notes(self._designer)),
        )

    def items(self, output: str, payloads: Sequence[DesignOrder]) -> list[Item]:
        return [
            Item(output, (order.key, order.structure.id, order.number), order, len(order.structure.residues) + 2)
            for order in payloads
        ]

    def compute(self, items: Sequence[Item]) -> list[NDArray[Any]]:
        """Return a record of sequence, score and recovery of the native residues per item."""
        records: dict[int, NDArray[Any]] = {}
        orders: list[DesignOrder] = [item.payload for item in items]
        # Designs of one structure by the same settings are computed together.
        same = [(order.key, order.structure.id) for order in orders]
        for _, group in groupby(sorted(range(len(items)), key=same.__getitem__), key=same.__getitem__):
            indices = list(group)
            order = orders[indices[0]]
            request = Request(order.structure, order.fixed, order.bias, order.tied, temperature=order.temperature)
            numbers = [orders[index].number for index in indices]
            designs = generate(self._designer, [request], numbers, seed=order.seed, tokens=self.about.tokens)
            texts = [design.residues for design in designs]
            scores = log_likelihoods(self._designer, order.structure, texts, tokens=self.about.tokens)
            native = order.structure.residues
            kind = [("sequence", f"U{len(native)}"), ("score", np.float64), ("recovery", np.float64)]
            records |= {
                index: np.array((text, score, recovery(text, native)), dtype=kind)
                for index, text, score in zip(indices, texts, scores, strict=True)
            }
        return [records[index] for index in range(len(items))]
