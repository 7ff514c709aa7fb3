"""Make an API key for the service, and add its hash to a file of keys.

The key is printed once and kept nowhere. Scopes are the names of models and of endpoints: embeddings, encode, decode,
classify, masked, tokenize, models, metrics. The service reads the file when it starts.

Examples:
  esmeray serve key --name alice --file keys.yaml
  esmeray serve key --name web --file keys.yaml --endpoints embeddings --residues-per-minute 1000000
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field

from common.arguments import ToolArguments, parse
from common.errors import ConfigError
from common.publishing import write_atomically, writing
from service.http.access import new_key, read_keys

Endpoint = Literal["*", "embeddings", "encode", "decode", "classify", "masked", "tokenize", "models", "metrics"]


class Arguments(ToolArguments):
    """The key's name, scopes and rates."""

    name: str = Field(min_length=1, description="Name of the key, for logs.")
    file: Path = Field(description="YAML file of keys, made if it is missing.")
    models: list[str] = Field(["*"], description="Models that it may use; '*' for all.")
    endpoints: list[Endpoint] = Field(["*"], description="Endpoints that it may use; '*' for all.")
    requests_per_minute: int | None = Field(None, gt=0, description="Default: any number.")
    residues_per_minute: int | None = Field(None, gt=0, description="Default: any number.")


def main(argv: list[str]) -> int:
    """Add the key, print it."""
    arguments = parse(Arguments, argv, "serve key", __doc__)
    known = read_keys(arguments.file) if arguments.file.exists() else []
    if arguments.name in {key.name for key in known}:
        raise ConfigError(f"--name {arguments.name}: {arguments.file} has a key of this name; choose another")
    text, key = new_key(arguments.name)
    settings = arguments.model_dump(include={"models", "endpoints", "requests_per_minute", "residues_per_minute"})
    keys = [*known, key.model_copy(update=settings)]
    content = yaml.safe_dump([each.model_dump(exclude_none=True) for each in keys], sort_keys=False)
    with writing(arguments.file):
        write_atomically(arguments.file, content)
        arguments.file.chmod(0o600)
    print(text)
    return 0
