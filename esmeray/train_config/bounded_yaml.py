"""Safe loading of untrusted YAML: bounded in depth and size, including repetition by aliases."""

from typing import Any

import yaml

_DEEPEST = 100
_MAX_NODES = 100_000
"""Maximum number of mappings, lists and values, some hundred times as many as in a file of settings."""


class BoundedLoader(yaml.SafeLoader):
    """PyYAML's safe loader with bounds; every error is a YAMLError.

    PyYAML 6.0.3 recurses without a limit, and nine lines of aliases can stand for a billion values.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._num_nodes = 0
        self._nodes_of_anchored: dict[yaml.Node | None, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        mark = self.peek_event().start_mark  # read now, because composing consumes the event
        is_alias = self.check_event(yaml.AliasEvent)
        before = self._num_nodes
        self._depth += 1
        self._num_nodes += 1
        if self._depth <= _DEEPEST and self._num_nodes <= _MAX_NODES:
            # Counted before construction: until then, a billion nodes of aliases are only nine lines.
            node = super().compose_node(parent, index)
            if is_alias and node not in self._nodes_of_anchored:
                raise yaml.composer.ComposerError(None, None, "an alias inside its own anchor", mark)
            self._num_nodes += self._nodes_of_anchored[node] if is_alias else 0
        if self._depth > _DEEPEST or self._num_nodes > _MAX_NODES:
            problem = f"more than {_MAX_NODES:,} values (with aliases expanded) or {_DEEPEST} levels"
            raise yaml.composer.ComposerError(None, None, problem, mark)
        self._depth -= 1
        self._nodes_of_anchored[node] = self._num_nodes - before
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        try:
            return super().construct_document(node)
        except (ValueError, OverflowError) as error:  # an invalid date, an integer of 5,000 digits
            raise yaml.constructor.ConstructorError(None, None, str(error), node.start_mark) from error
