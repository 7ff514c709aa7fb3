"""Serve models over HTTP: embeddings, classes, mutation scores, and a page to try them.

    esmeray serve --config FILE
    esmeray serve --models runs/locations facebook/esm2_t6_8M_UR50D

Models are trained runs and their exports, and folders or hub names of transformers. The page is at http://HOST:PORT/,
the endpoints at /docs; OpenAI's Python client and clients of text-embeddings-inference work unchanged. Without API
keys the service listens on 127.0.0.1 alone; 'esmeray serve key' makes keys.

Runs on the Ray cluster at hand, or starts one. SIGHUP reads settings and weights again and replaces the replicas of
what has changed while requests are answered; a model with one replica needs room for a second one meanwhile. Ctrl-C
lets what is being answered end.

Examples:
  python serve_ray.py --config train_config/serve.yaml
  python serve_ray.py --models esm2_t6_8M --random-weights --port 8080
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic import Field

from common.arguments import ToolArguments, parse
from common.command_line import result_console
from common.errors import ConfigError
from train_config.loading import dump_config, load_service_config
from train_config.service_schema import ServiceConfig

SHIPPED = "train_config/serve.yaml"


class Arguments(ToolArguments):
    """The file, and what overrides it."""

    config: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = Field(
        None, description=f"YAML file of models, limits and access, such as {SHIPPED}."
    )
    models: list[str] = Field([], description="Models to serve in place of the file's, by folder, run or hub name.")
    random_weights: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Of --models: take sizes (esm2_t6_8M), whose weights are drawn, to try the service out."
    )
    host: str | None = Field(None, description="Address to listen on.")
    port: int | None = Field(None, description="Port.")
    keys: str | None = Field(None, description="YAML file of API keys, as 'esmeray serve key' writes it.")
    ray_address: Annotated[str | None, tyro.conf.arg(name="ray.address", metavar="HOST:PORT")] = Field(
        None, description="Ray cluster; local starts one. Default: RAY_ADDRESS, or one that runs here."
    )
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = Field(
        False, description="Print the resolved settings and start nothing."
    )


def main(argv: list[str]) -> int:
    """Check the settings and serve."""
    arguments = parse(Arguments, argv, "serve", __doc__)
    if arguments.config is None and not arguments.models:
        raise ConfigError(f"--config: name a file, for example {SHIPPED}, or models by --models")
    given: dict[tuple[str, ...], Any] = {("host",): arguments.host, ("port",): arguments.port}
    given[("access", "keys")], given[("ray", "address")] = arguments.keys, arguments.ray_address
    if arguments.models:
        random = {"random_weights": arguments.random_weights}
        given[("models",)] = [{"name": _name(source), "source": source, **random} for source in arguments.models]
    overrides = {key: value for key, value in given.items() if value is not None}

    def read() -> ServiceConfig:
        return load_service_config(arguments.config, overrides)

    if arguments.dry_run:
        print(dump_config(read()), end="")
        return 0
    from service.launch import run  # here: it loads Ray

    console = result_console()
    return run(read, lambda text: console.print(text, markup=False))


def _name(source: str) -> str:
    """The folder's or the hub model's own name."""
    path = Path(source)
    return path.parent.name if path.name == "export" else path.name
