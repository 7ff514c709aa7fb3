"""Settings of earlier versions: renamed or removed since, and how a recorded config that has them is read.

A config is recorded in a run's folder, its checkpoints and its export. What a setting's old name meant is translated;
what no version does any more is refused in a line. A user's own file gets the new name in its error instead.
"""

from copy import deepcopy
from typing import Any

from common.errors import ConfigError

RENAMED: dict[str, tuple[str, dict[str, str]]] = {
    "training.amp_dtype": ("training.precision", {"none": "fp32"}),
    "data.predictions.batch_tokens": ("data.predictions.tokens", {}),
}
"""The name of this version, and values that have another name as well."""

REMOVED: dict[str, Any] = {
    "model.diffusion.space": "tokens",
    "model.diffusion.autoencoder": None,
    "model.diffusion.self_condition": False,
    "monitoring.alerts.leak_percent_per_epoch": ...,
    "monitoring.alerts.silent_worker_s": ...,
}
"""The value that means what is done now; the ellipsis for settings that no result depended on."""


def current(recorded: dict[str, Any], place: object) -> dict[str, Any]:
    """The recorded settings by the names of this version.

    ``place`` is where they stand, for the refusal: ConfigError for a setting of what this version can't do.
    """
    if "homology" in recorded:  # of the tree of settings that function prediction had of its own
        raise ConfigError(
            f"{place}: is of a run of function prediction of an earlier version, and can't be resumed: choose "
            "another --run.name, or remove its folder"
        )
    settings = deepcopy(recorded)
    for old, (key, values) in RENAMED.items():
        section, name = _place(settings, old)
        if name in section:
            value = section.pop(name)
            section, name = _place(settings, key)
            section[name] = values.get(value, value)
    for old, equivalent in REMOVED.items():
        section, name = _place(settings, old)
        value = section.pop(name, ...)
        if ... not in (value, equivalent) and value != equivalent:
            raise ConfigError(
                f"{place}: {old} is {value!r}, which this version has no more: use the version of Esmeray that wrote it"
            )
    return settings


def renamed_hint(name: str) -> str:
    """The words that lead from an old name to the new one; empty for others."""
    if name not in RENAMED:
        return ""
    key, values = RENAMED[name]
    renamed = ", ".join(f"{old} as {new}" for old, new in values.items())
    return f" (it is {key} now, with {renamed})" if values else f" (it is {key} now)"


def _place(settings: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The section that a dotted key is in, made where it is not there, and the name in it."""
    *sections, name = key.split(".")
    for section in sections:
        settings = settings.setdefault(section, {})
    return settings, name
