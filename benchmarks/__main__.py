"""Measure Esmeray's data and model path, compared with what people use for it today.

Without a name every stage runs. Results go to benchmarks/results/MACHINE: results.json with every sample, and
results.md. Naming stages measures these again and leaves the others as they are. Ctrl-C keeps what is finished.

Examples:
  python -m benchmarks
  python -m benchmarks proteome training
  python -m benchmarks --quick
  python -m benchmarks --list
  python -m benchmarks public --help
  python -m benchmarks gpu --help
"""

import argparse
import importlib
import importlib.util
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.stage import Stage
from esmeray.common.command_line import end_process
from esmeray.common.errors import ConfigError

RESULTS_ROOT = Path(__file__).resolve().parent / "results"
MODULES = ("proteome", "index", "service", "training", "time_to_loss", "function_evaluation", "design")
"""Modules of the stages, in the order in which data flows. Add a new stage here. Importing one loads no peer."""
SCRIPTS = ("gpu", "public")
"""First words of a command line that belongs to another script."""


def main(argv: list[str]) -> int:
    """Parse, check that all peers are installed, measure."""
    if argv and argv[0] in SCRIPTS:
        # Imported here: they load torch, which --help does not need.
        return importlib.import_module(f"benchmarks.{argv[0]}.script").main(argv[1:])
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help="stages to measure; all if none is named: " + ", ".join(MODULES))
    add("--quick", action="store_true", help="a smoke run: everything once on little work; its values mean nothing")
    add("--output", type=Path, help="folder of the results; benchmarks/results/MACHINE, with --quick its folder quick")
    add("--fasta", type=Path, help="proteins to work on; the UniRef90 sample of development, or the embedded sample")
    add("--vectors", type=int, nargs="+", default=[100_000, 1_000_000], help="sizes of the indexes of the stage index")
    add("--list", action="store_true", help="list the stages, and end")
    arguments = parser.parse_args(argv)
    # Without downloads and messages of the peers' libraries while time is taken.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", TOKENIZERS_PARALLELISM="false")
    stages = load_stages(arguments.stages)
    if arguments.list:
        for stage in stages:
            print(f"{stage.name}: {stage.summary}")
        return 0
    require_packages(stages)
    # Imported here, since they load torch.
    from benchmarks.harness.machine import describe_machine
    from benchmarks.harness.runner import Run, run_stages

    machine = describe_machine()
    if machine.gpu is None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise DeepSpeed warns that it found no accelerator
    default = RESULTS_ROOT / machine.slug / ("quick" if arguments.quick else "")
    output = (arguments.output or default).absolute()
    # Results are published with their command: an absolute path is cut to its last part.
    words = [Path(word).name if Path(word).is_absolute() else word for word in argv]
    command = shlex.join(["python", "-m", "benchmarks", *words])
    return run_stages(stages, Run(machine, output, arguments.quick, command, arguments.fasta, tuple(arguments.vectors)))


def load_stages(names: Sequence[str] = ()) -> list[Stage]:
    """Return the stages in the order of the data; all if none is named. Raises ConfigError for an unknown name."""
    if unknown := set(names) - {*MODULES}:
        raise ConfigError(f"no stage is called {min(unknown)!r}; there are {', '.join(MODULES)}")
    chosen = [name for name in MODULES if name in names or not names]
    return [importlib.import_module(f"benchmarks.stages.{name}").STAGE for name in chosen]


def require_packages(stages: Sequence[Stage]) -> None:
    """Raise ConfigError for the first peer that is not installed."""
    # For all stages at once: otherwise the last one's peer would be missed after an hour.
    for stage in stages:
        for package in stage.packages:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(f"stage {stage.name} needs the package {package}: 'make bench' installs the peers")


if __name__ == "__main__":
    end_process(main)
