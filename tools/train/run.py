"""Train an experiment on a Ray cluster, or search for the settings that train it fastest.

    esmeray train --config FILE [--section.key VALUE ...]
    esmeray train --config FILE --dry-run
    esmeray train --config FILE --tune train_config/tune_throughput.yaml [--tune.section.key VALUE ...]

Connects to the Ray cluster at hand or starts a local one, prepares the data once, trains with one worker a device and
prints where the result is. The same command resumes a run of the same name that stopped. With --tune it measures
configurations instead and writes the fastest as best.yaml, which is an experiment like FILE.

An option overrides the file. Lists take several values; none clears an optional setting and empties a list.

Example: esmeray train --config train_config/esm2ae.yaml --data.source proteins.fasta.gz --run.name first
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field

from cluster.placement import find
from common.arguments import ToolArguments, parse, program_of
from common.errors import ConfigError
from train_config.loading import load_config, load_tune_config
from train_config.overrides import parse_sections
from train_config.schema import Config
from train_config.section import Section
from train_config.tune_schema import TuneConfig

EXPERIMENT = "train_config/esm2ae.yaml"
SEARCH = "train_config/tune_throughput.yaml"


class Arguments(ToolArguments):
    """The files, and what to do with them."""

    config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = Field(
        None, description="The experiment's YAML file. Defaults below are its settings."
    )
    tune: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = Field(
        None, description="YAML file of a search: measure configurations instead of training."
    )
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Print the resolved settings and the plan, and start nothing."
    )


def main(argv: list[str]) -> int:
    """Parse, check, train or search."""
    return start(argv, "train", __doc__ or "")


def start(argv: list[str], tool: str, description: str, search: str | None = None) -> int:
    """Train; or search, as the file of ``--tune`` says, or else ``search``."""
    words = [word for word in argv if word not in ("-h", "--help")]
    files, _ = parse(Arguments, words, tool, return_unknown_args=True, add_help=False)
    tune_file = files.tune or search
    if words != argv:
        sections: dict[str, Section] = {"": load_config(files.config)}
        if tune_file is not None:
            sections["tune"] = load_tune_config(tune_file)
        parse_sections(Arguments, ["--help"], tool, description, sections)
    _, given = parse_sections(Arguments, argv, tool, description, {"": Config(), "tune": TuneConfig()})
    if files.config is None:
        raise ConfigError(
            f"--config: no experiment is named; usage: {program_of(tool)} --config FILE [--section.key VALUE ...], for "
            f"example --config {EXPERIMENT} (see --help)"
        )
    if given["tune"] and tune_file is None:
        option = ".".join(("--tune", *next(iter(given["tune"]))))
        raise ConfigError(f"{option}: is of a search, and there is none: add --tune {SEARCH}")
    config = load_config(files.config, given[""])
    if tune_file is None:
        from training.launch.driver import dry_run, train

        return dry_run(config) if files.dry_run else train(config, _beside)
    if config.data.predictions.model is not None:
        raise ConfigError("data.predictions.model: nobody predicts beside a search; predict first, and leave it out")
    if not files.dry_run:
        find(config.ray)  # a cluster that can't be used is refused before what a search needs is loaded
    from tuning.run import dry_run_tune, tune

    settings = load_tune_config(tune_file, given["tune"])
    return dry_run_tune(config, settings) if files.dry_run else tune(config, settings)


def _beside(config: Config, store: Path) -> AbstractContextManager[Config]:
    """The predictor of structures, where the data asks for one."""
    if config.data.predictions.model is None:
        return nullcontext(config)
    from inference.folding.ahead import predicting

    return predicting(config, store)
