"""Propagation by the kernel and by its path in torch gives what NumPy gives, value by value."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch

from function.ontology import Aspect, read_ontology
from function.propagation import Method, propagate_dense
from model.kernels.propagation import Propagation
from tests.conftest import REPOSITORY
from tests.function.generated import generate


def aspects(seeds: int) -> list[Aspect]:
    with tempfile.TemporaryDirectory() as folder:
        made = [read_ontology(generate(Path(folder) / str(seed), seed).folder / "terms.obo") for seed in range(seeds)]
    return [aspect for one in made for aspect in one.aspects.values()]


def check(seeds: int, proteins: int, propagation: type[Propagation] = Propagation, device: str = "cpu") -> None:
    random = np.random.default_rng(0)
    methods: tuple[Method, ...] = ("max", "fill")
    for aspect in aspects(seeds):
        for method in methods:
            for dtype in (np.float32, np.float64, np.uint8):
                shape = (len(aspect.terms), proteins)
                given = (random.integers(1, 100, shape) * (random.random(shape) < 0.2) / 3).astype(dtype)
                found = torch.from_numpy(given.copy()).to(device)
                propagation(aspect.steps, device)(found, method)
                propagate_dense(given, aspect, method)
                np.testing.assert_array_equal(found.cpu().numpy(), given)


def test_propagated_in_torch_is_what_numpy_gives():
    check(seeds=6, proteins=37)
    check(seeds=1, proteins=0)


@pytest.mark.cuda
def test_propagated_on_a_gpu_is_what_numpy_gives():
    check(seeds=20, proteins=1000, device="cuda")


def test_propagated_under_tritons_interpreter_is_what_numpy_gives():
    pytest.importorskip("triton", reason="needs Triton, which the CPU build of torch leaves out")
    code = "from tests.model.kernels.test_propagation import interpreted; interpreted()"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def interpreted() -> None:
    """In a process of its own: Triton decides between interpreter and compiler when it is imported."""
    from model.kernels import propagation, propagation_triton

    propagation.propagate_in_torch = propagation_triton.propagate
    check(seeds=3, proteins=513)
