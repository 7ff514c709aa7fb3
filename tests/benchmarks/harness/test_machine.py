from esmeray.benchmarks.harness.machine import slugify
from tests.benchmarks.harness.toy_stage import MACHINE


def test_a_gpu_names_the_folder_of_the_machine_that_has_one_and_cores_the_other():
    assert MACHINE.slug == "toy-2-cores"
    assert MACHINE.model_copy(update={"gpu": "NVIDIA H200"}).slug == "nvidia-h200"
    assert slugify("Intel(R) Xeon(R) Platinum 8480C CPU @ 2.00GHz") == "intel-xeon-platinum-8480c"
    assert slugify("AMD EPYC 9654 96-Core Processor") == "amd-epyc-9654"
    assert slugify("") == "machine"
