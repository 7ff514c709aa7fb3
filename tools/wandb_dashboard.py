"""Make the W&B workspace that shows every figure of a run: GPUs, memory, throughput, loss, each worker.

Without --save it is written as JSON, to --output or the screen, and no server is asked. With --save it is put into the
project on the server, where it is found under Workspaces.

Examples:
  python -m tools wandb_dashboard --output dashboard.json
  python -m tools wandb_dashboard --project esmeray --entity my-team --workers 8 --save
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated

import tyro
from pydantic import Field, PositiveInt

from common.arguments import ToolArguments, parse
from common.command_line import one_line
from common.errors import ResourceError
from common.publishing import made_file, refuse_file
from monitoring.sinks.wandb_dashboard import build_dashboard, specification
from train_config.schema import WandbSection

MADE_BY = "wandb_dashboard"
SAVE_LIMIT_S = 60.0
"""Seconds that the server may take; wandb itself would try for longer."""
CONNECT_LIMIT_S = 10.0
NO_ACCOUNT = "an account of W&B is needed, and no API key was found: run wandb login, or set WANDB_API_KEY"


class Arguments(ToolArguments):
    """Which project, and where the workspace goes."""

    project: str = Field(WandbSection().project, description="Project of W&B.")
    entity: str | None = Field(None, description="User or team; default: that of the API key.")
    workers: PositiveInt = Field(1, description="Workers whose steps are drawn as stacked parts.")
    output: Path | None = Field(None, description="File for the specification, JSON. Default: the screen.")
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Replace the file if this tool wrote it and nobody changed it since."
    )
    save: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Put it on the server (WANDB_API_KEY, WANDB_BASE_URL), and leave with 4 if that fails."
    )


def main(argv: list[str]) -> int:
    """Build, write, and save if asked."""
    arguments = parse(Arguments, argv, "wandb_dashboard", __doc__)
    if arguments.output is not None:
        refuse_file(arguments.output, MADE_BY, arguments.overwrite)
    text = json.dumps(specification(build_dashboard(arguments.project, arguments.entity or "", arguments.workers)))
    if arguments.output is not None:
        with made_file(arguments.output, MADE_BY, arguments.overwrite) as building:
            building.write_text(text + "\n", encoding="utf-8")
        print(arguments.output)
    elif not arguments.save:
        print(text)
    if arguments.save:
        print(save(arguments.project, arguments.entity, arguments.workers))
    return 0


def save(project: str, entity: str | None, workers: int) -> str:
    """Put the workspace on the server; returns its address.

    Raises:
        ResourceError: the server is not reached, or refuses.
    """
    script = "from tools.wandb_dashboard import _save; import sys; _save(*sys.argv[1:])"
    command = [sys.executable, "-c", script, project, entity or "", str(workers)]
    # In a process of its own: wandb asks for a key at a terminal, and tries again for minutes what can't be reached.
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SAVE_LIMIT_S,
            env=os.environ | {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"},
            cwd=Path(__file__).resolve().parent.parent,
        )
    except subprocess.TimeoutExpired:
        raise ResourceError(f"the workspace is not saved: W&B did not answer within {SAVE_LIMIT_S:g} s") from None
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        if reason == NO_ACCOUNT:
            raise ResourceError(f"the workspace is not saved: {NO_ACCOUNT}")
        raise ResourceError(
            f"the workspace is not saved: {reason}; check WANDB_API_KEY, WANDB_BASE_URL and the network"
        )
    return done.stdout.strip().splitlines()[-1]


def _save(project: str, entity: str, workers: str) -> None:
    """In the process that :func:`save` starts: prints the address."""
    import wandb

    try:
        if not wandb.login(prompt=False, verify=False):  # before a host is named that nobody chose
            print(NO_ACCOUNT, file=sys.stderr)
            sys.exit(ResourceError.exit_code)
        _reach(wandb.setup().settings.base_url)
        workspace = build_dashboard(project, entity or wandb.Api().default_entity or "", int(workers))
        workspace.save()
        print(workspace.url)
    except Exception as error:  # noqa: BLE001 - whatever wandb raises is told in one line
        print(f"{type(error).__name__}: {one_line(error)}", file=sys.stderr)
        sys.exit(ResourceError.exit_code)


def _reach(address: str) -> None:
    """Raise OSError where nobody is at this address; wandb takes half a minute for it, and says something else."""
    try:
        urllib.request.urlopen(address, timeout=CONNECT_LIMIT_S).close()
    except urllib.error.HTTPError:
        return  # somebody answers
    except OSError as error:
        raise ConnectionError(f"{address} can't be reached ({getattr(error, 'reason', error)})") from error
