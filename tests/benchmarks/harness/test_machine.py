"""Names of machines."""

import pytest

from esmeray.benchmarks.harness.machine import slugify
from tests.benchmarks.harness.toy_stage import MACHINE


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia-h200"),
        ("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz", "intel-xeon-platinum-8480c"),
        ("AMD EPYC 9654 96-Core Processor", "amd-epyc-9654"),
        ("", "machine"),
    ],
)
def test_a_name_becomes_a_folder(name: str, slug: str):
    assert slugify(name) == slug


def test_a_gpu_names_the_machine_that_has_one_and_cores_the_other():
    assert MACHINE.slug == "toy-2-cores"
    assert MACHINE.model_copy(update={"gpu": "NVIDIA H200"}).slug == "nvidia-h200"
