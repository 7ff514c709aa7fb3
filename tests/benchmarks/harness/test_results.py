"""Verdicts on ratios, results of earlier runs, and the names of their folders."""

import pytest

from esmeray.benchmarks.__main__ import RESULTS_ROOT
from esmeray.benchmarks.harness.machine import slugify
from esmeray.benchmarks.harness.results import read_results, verdict
from esmeray.common.timing import Ratio
from tests.benchmarks.harness.toy_stage import MACHINE


def test_a_verdict_says_whether_the_whole_interval_agrees():
    assert verdict(Ratio(2.0, 1.9, 2.1), 1.5) == "reached"
    assert verdict(Ratio(2.0, 1.4, 2.1), 1.5) == "reached, within noise"
    assert verdict(Ratio(1.4, 1.3, 1.6), 1.5) == "missed, within noise"
    assert verdict(Ratio(1.4, 1.3, 1.45), 1.5) == "missed"
    assert verdict(Ratio(1.4, 1.3, 1.45), None) == "no floor"


def test_a_gpu_names_the_folder_of_the_machine_that_has_one_and_cores_the_other():
    assert MACHINE.slug == "toy-2-cores"
    assert MACHINE.model_copy(update={"gpu": "NVIDIA H200"}).slug == "nvidia-h200"
    assert slugify("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz") == "intel-xeon-platinum-8480c"
    assert slugify("") == "machine"


@pytest.mark.parametrize("folder", sorted(RESULTS_ROOT.glob("*/results.json")), ids=lambda path: path.parent.name)
def test_results_in_the_repository_stay_readable(folder):
    assert read_results(folder.parent, MACHINE).cases
