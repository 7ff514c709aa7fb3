"""Measure your own store and say what is slow and what to change.

Runs the stages from the store to the model's output: reading, tokenizing, packing, loading by 0, 1 and 2 loader
processes, inference across token budgets and precisions, and the whole pipeline with the share of time that the
model waits for data. Prints a table and then advice: keys to set, each with its ratio, only where
the whole interval agrees. Nothing is trained, and the store is only read. Runs on a GPU where there is one.

A folder is written: benchmark.png and benchmark.json, with every sample. Close what else uses the machine; variants
take turns, so that ratios hold even where times don't.

Examples:
  esmeray profile store uniref50_store
  esmeray profile store uniref50_store --model esm2_t30_150M --seconds 300
  esmeray profile store uniref50_store --model facebook/esm2_t12_35M_UR50D
  esmeray profile store uniref50_store --json | jq -r '.advice[]'
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from pydantic import Field
from rich.text import Text

from common.arguments import ToolArguments, parse
from common.command_line import result_console
from common.progress import status_line
from common.publishing import made_folder
from common.text import counted
from dataset.store.reader import Store
from monitoring.advice import advise
from train_config.schema import BackboneSection, DataSection

if TYPE_CHECKING:
    from tools.profile._store.subject import StageResult

MADE_BY = "benchmark"


class Arguments(ToolArguments):
    """Subject and length of the measurement."""

    store: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="STORE")] = Field(
        description="Folder of the store."
    )
    model: str = Field(
        BackboneSection().source,
        description="As model.backbone.source: a size with random weights, a local folder, or a hub name.",
    )
    max_length: int = Field(
        DataSection().max_length, gt=0, description="Residues; longer sequences are cropped, as by data.max_length."
    )
    seconds: float = Field(
        60.0, gt=0, description="Time for all stages. Large models take at least a round of each, whatever it takes."
    )
    output: Path | None = Field(None, description="Folder of the results. Default: benchmark-STORE, here.")
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace the folder if it is a benchmark that nobody changed since."
    )
    json_: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(name="json")] = Field(
        False, description="Print one JSON object in place of the tables."
    )


def main(argv: list[str]) -> int:
    """Open a store, measure, print and draw."""
    arguments = parse(Arguments, argv, "profile store", __doc__)
    store = Store(Path(arguments.store))
    output = arguments.output or Path(f"benchmark-{store.path.name}")
    with made_folder(output.absolute(), MADE_BY, arguments.overwrite) as building:
        facts, stages = measured(arguments, store, building / "benchmark.png")
        (building / "benchmark.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if arguments.json_:
        print(json.dumps(facts, indent=1))
        return 0
    from tools.profile._store.report import table

    console = result_console()
    console.print(Text(_heading(facts)), Text(), table(stages), sep="\n")
    for title, lines in (("What is slow", facts["slow"]), ("Advice", facts["advice"])):
        console.print(Text(title, style="bold"), *(Text(f"  {line}") for line in lines), Text(), sep="\n")
    console.print(Text(f"written: {output}/benchmark.png and benchmark.json"))
    return 0


def measured(arguments: Arguments, store: Store, picture: Path) -> tuple[dict[str, Any], list[StageResult]]:
    """Run the stages and draw them; return everything as plain values, and the stages.

    Raises DataError where the store or the model's weights are damaged, ConfigError or ResourceError where the model
    can't be had.
    """
    import torch  # here, so that --help answers at once

    from tools.profile._store.report import adviser_facts, draw, stage_facts
    from tools.profile._store.stages import run_stages
    from tools.profile._store.subject import Subject

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    backbone = BackboneSection(source=arguments.model)
    with status_line() as show:
        subject = Subject(store, backbone, arguments.max_length, device, arguments.seconds, show)
        stages = {stage.name: stage for stage in run_stages(subject)}
    found = advise(adviser_facts(stages))
    advice = [str(line) for line in found if line.topic != "slowest stage"]
    facts = {
        "store": str(store.path),
        "records": len(store),
        "longest_tokens": subject.longest_tokens,
        "cropped_share": float((store.lengths > arguments.max_length).mean()),
        "tokens_per_record": float(subject.tokens_of(subject.some_records()).mean()),
        "model": arguments.model,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "seconds": round(subject.passed_s, 1),
        "slow": [str(line) for line in found if line.topic == "slowest stage"],
        "advice": advice or ["leave the settings: no other value that was measured is faster beyond the spread"],
        "stages": {name: stage_facts(stage) for name, stage in stages.items()},
    }
    draw(stages, f"{store.path.name}: {arguments.model} on {facts['device']}", picture)
    return facts, list(stages.values())


def _heading(facts: dict[str, Any]) -> str:
    cropped = f", {100 * facts['cropped_share']:.1f} % cropped" if facts["cropped_share"] else ""
    return (
        f"{facts['store']}: {counted(facts['records'], 'record{s}')}, {facts['tokens_per_record']:,.0f} tokens each on "
        f"average, {facts['longest_tokens']:,} the longest{cropped}; {facts['model']} on {facts['device']}, "
        f"torch {facts['torch']}; took {facts['seconds']:.0f} s"
    )
