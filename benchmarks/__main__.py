"""Measure each stage of the data and model path beside what people use for it today.

Without a name every stage runs. Results go to benchmarks/results/MACHINE: results.json with every sample, results.md
and results.png. Naming stages measures these again and leaves the others as they are. Ctrl-C keeps what is finished.

Examples:
  python -m benchmarks
  python -m benchmarks proteome loading
  python -m benchmarks --quick
  python -m benchmarks --list
  python -m benchmarks public --help
  python -m benchmarks gpu --help
  python -m benchmarks record --help
"""

import argparse
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.stage import Stage, check_names
from esmeray.common.command_line import end_process
from esmeray.common.errors import ConfigError

RESULTS_ROOT = Path(__file__).resolve().parent / "results"
MODULES = (
    "conversion",
    "loading",
    "proteome",
    "index",
    "streaming",
    "service",
    "training",
    "masked_lm_recipe",
    "time_to_loss",
    "runs",
    "alignment",
    "function_evaluation",
    "antiberty",
)
"""Modules of the stages, in the order in which data flows; a new stage is a name here. Importing one loads no peer."""
SCRIPTS = {"gpu": "gpu.script", "public": "public.script", "record": "record"}
"""First words of a command line that is another script's, and its module."""


def parsed(argv: list[str]) -> argparse.Namespace:
    """Stages to measure, and the folder of their results."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help="stages to measure; all if none is named: " + ", ".join(MODULES))
    add(
        "--quick", action="store_true", help="do everything once on little work: a smoke run, whose values mean nothing"
    )
    add("--output", type=Path, help="folder of the results; benchmarks/results/MACHINE, with --quick its folder quick")
    add("--fasta", type=Path, help="proteins to work on; the UniRef90 sample of development, or the embedded sample")
    add("--vectors", type=int, nargs="+", default=[100_000, 1_000_000], help="sizes of the indexes of the stage index")
    add("--list", action="store_true", help="show the stages and what each has to reach, and end")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Parse, check that all peers are there, measure."""
    if argv and argv[0] in SCRIPTS:
        if argv[0] == "record":
            # Before torch is loaded: an entry is of two cores, also on a machine that has a GPU.
            os.environ.update(DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1")
        # Here: they load torch, which --help need not.
        return importlib.import_module(f"benchmarks.{SCRIPTS[argv[0]]}").main(argv[1:])
    arguments = parsed(argv)
    stages = load_stages(arguments.stages)
    if arguments.list:
        list_stages(stages)
        return 0
    require_packages(stages)
    # Peers' tokenizers and hubs neither report nor ask for anything while time is taken.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")
    # Results are published with their command: a path of this machine is cut to its last part.
    words = [Path(word).name if Path(word).is_absolute() else word for word in argv]
    return _measure(stages, arguments, shlex.join(["python", "-m", "benchmarks", *words]))


def load_stages(names: Sequence[str] = ()) -> list[Stage]:
    """The stages of these names in the order of the data; all if none is named. Raises ConfigError for another name."""
    check_names("stage", names, MODULES)
    return [
        importlib.import_module(f"benchmarks.stages.{name}").STAGE for name in MODULES if name in names or not names
    ]


def require_packages(stages: Sequence[Stage]) -> None:
    """Refuse to start where a peer is not installed, by a ConfigError that names the first."""
    # All of them before any stage: the last one's peer would be missed after an hour of measuring.
    for stage in stages:
        for package in stage.packages:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(f"stage {stage.name} needs the package {package}: 'make bench' installs the peers")


def _measure(stages: list[Stage], arguments: argparse.Namespace, command: str) -> int:
    from benchmarks.harness.machine import describe_machine  # here: they load torch and matplotlib
    from benchmarks.harness.runner import Run, run_stages

    machine = describe_machine()
    if machine.gpu is None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed would warn that it found nothing better
    default = RESULTS_ROOT / machine.slug / ("quick" if arguments.quick else "")
    output = (arguments.output or default).absolute()
    run = Run(machine, output, arguments.quick, command, MODULES, arguments.fasta, tuple(arguments.vectors))
    try:
        broken = run_stages(stages, run)
    except KeyboardInterrupt:
        # Raised on: the exit code is to be that of the signal.
        print(f"stopped; what was finished is in {output}", file=sys.stderr)
        raise
    print(f"results: {output}/results.md, results.json and results.png")
    if broken:
        print(f"{len(broken)} of {len(stages)} stages broke: {', '.join(broken)}", file=sys.stderr)
    return 1 if broken else 0


def list_stages(stages: Sequence[Stage]) -> None:
    for stage in stages:
        print(f"{stage.name}: {stage.summary}")
        for comparison in stage.comparisons:
            floors = ", ".join(f"{floor:g} on {device}" for device, floor in comparison.floors.items())
            print(f"  {comparison.title}, beside {comparison.peer_name}: {floors or 'no floor'}")


if __name__ == "__main__":
    end_process(main)
