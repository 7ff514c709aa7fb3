"""The label in a FASTA header: what a regular expression finds there, or one of its words.

In: the settings, a header. Out: the label as text, or None.
"""

from __future__ import annotations

import re

from common.errors import ConfigError
from train_config.classifier_schema import LabelsSection

SAMPLE_PATTERN = r"^(?P<label>\w+)_\d+$"
"""The label in an id of the embedded labelled samples, where settings name no other."""


class HeaderLabels:
    """Finds labels in headers."""

    def __init__(self, labels: LabelsSection, default_pattern: str | None = None) -> None:
        """Compile the pattern.

        Args:
            labels: the settings.
            default_pattern: what to look for where the settings say nothing.

        Raises:
            ConfigError: no place is named, or the pattern is wrong.
        """
        self._field = labels.header_field
        self._pattern: re.Pattern[str] | None = None
        if labels.header_field is None:
            pattern = labels.header_pattern or default_pattern
            if pattern is None:
                raise ConfigError(
                    "labels of FASTA stand in its headers: set data.labels.header_field or data.labels.header_pattern"
                )
            self._pattern = compiled(pattern)
            self._group = "label" if "label" in self._pattern.groupindex else 1

    def find(self, header: str) -> str | None:
        """The label in a header; None where there is none."""
        if self._pattern is not None:
            match = self._pattern.search(header)
            return match[self._group] if match else None
        words = header.split()
        return words[self._field] if self._field is not None and self._field < len(words) else None

    def missing(self, header: str) -> str:
        """The message for a header without a label."""
        if self._pattern is not None:
            return f"data.labels.header_pattern {self._pattern.pattern!r} finds no label in the header {header!r}"
        num_words = len(header.split())
        return f"data.labels.header_field {self._field} is beyond the last of the {num_words} words of {header!r}"


def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern with a group.

    Raises:
        ConfigError: no regular expression, or one without a group.
    """
    try:
        found = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"data.labels.header_pattern {pattern!r} is no regular expression: {error}") from error
    if not found.groups:
        raise ConfigError(f"data.labels.header_pattern {pattern!r} has no group: put (?P<label>...) around the label")
    return found
