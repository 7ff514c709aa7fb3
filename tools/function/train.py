"""Train the predictors of protein functions, and blend them.

    esmeray function train --config FILE [--section.key VALUE ...]

Frequencies of terms, homology, nearest neighbours of embeddings and a network for each aspect of the ontology are
fitted to annotated proteins; held-out ones weight the blend. Prints what each reaches on these. The same command
resumes a run that stopped. 'esmeray function predict' predicts with the run; docs/function.md describes its folder.

Examples:
  esmeray function train --config train_config/function.yaml
  esmeray function train --config train_config/function.yaml --name mine --data.sequences proteins.fasta \
--data.annotations truth.tsv --data.ontology go-basic.obo
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field
from rich.table import Table

from common.arguments import ToolArguments, parse
from common.command_line import result_console
from common.errors import ConfigError
from common.text import counted
from train_config.function_schema import FunctionConfig
from train_config.loading import dump_config, load_function_config
from train_config.overrides import parse_sections

EXPERIMENT = "train_config/function.yaml"


class Arguments(ToolArguments):
    """The file, and what to do with it."""

    config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = Field(
        None, description=f"YAML file of the settings, such as {EXPERIMENT}."
    )
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Print the resolved settings and start nothing."
    )


def main(argv: list[str]) -> int:
    """Check, train, print."""
    words = [word for word in argv if word not in ("-h", "--help")]
    if words != argv:
        files, _ = parse(Arguments, words, "function train", return_unknown_args=True, add_help=False)
        parse_sections(Arguments, ["--help"], "function train", __doc__, {"": load_function_config(files.config)})
    arguments, given = parse_sections(Arguments, argv, "function train", __doc__, {"": FunctionConfig()})
    if arguments.config is None:
        raise ConfigError(f"--config: no file of settings is named; for example --config {EXPERIMENT} (see --help)")
    config = load_function_config(arguments.config, given[""])
    if arguments.dry_run:
        print(dump_config(config), end="")
        return 0
    from inference.function.training import train_function  # here: it loads torch

    blend = train_function(config)
    console = result_console()
    for name, one in blend.items():
        table = Table("part", "weight", "Fmax", "weighted Fmax")
        for part, values in one["validation"].items():
            weight = f"{one['weights'][part]:.2f}" if part in one["weights"] else ""
            table.add_row(part, weight, f"{values['fmax']:.3f}", f"{values['fmax_w']:.3f}")
        console.print(f"{name}: {counted(one['proteins'], 'held-out protein{s}')}")
        console.print(table)
    console.print(f"written: {Path(config.storage_path) / config.name}", markup=False)
    return 0
