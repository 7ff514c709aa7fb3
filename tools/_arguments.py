"""What the arguments of every tool are made of: a value out of range is one line, as every other refusal.

tyro shows what pydantic raises in a box with an address of pydantic's; what is no ValueError it lets through.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from train_config.errors import ConfigError


class ToolArguments(BaseModel):
    """Base of a tool's arguments.

    Raises:
        ConfigError: a value is refused; names its option.
    """

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError("; ".join(_describe(problem) for problem in error.errors())) from None


def _describe(problem: Any) -> str:
    option = ".".join(str(part).rstrip("_").replace("_", "-") for part in problem["loc"][:1])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"--{option}: {message}" if option else message
    return f"--{option}: {message[0].lower()}{message[1:]}, got {problem['input']!r}"
