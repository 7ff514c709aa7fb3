"""Validation of public functions' arguments by their annotations; a wrong one is a one-line ConfigError."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar

from pydantic import ConfigDict, ValidationError, validate_call

from esmeray.common.errors import ConfigError, refusal

P = ParamSpec("P")
T = TypeVar("T")


def checked_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to raise ConfigError for arguments of a wrong type, e.g. None, or a str for a list.

    Paths may be strings.
    """
    validated: Callable[..., T] = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        arguments = signature(function).bind(*args, **kwargs).arguments  # by name, for the messages
        try:
            return validated(**arguments)
        except ValidationError as error:
            problem = error.errors()[0]
            raise ConfigError(f"{problem['loc'][0]}: {refusal(problem)}") from error

    return call
