"""Settings of a vector index."""

from pathlib import Path
from typing import Literal

from esmeray.inference.index.metric import MetricName
from esmeray.train_config.section import Section

Kind = Literal["exact", "compressed"]


class IndexSection(Section):
    """The index to create or extend."""

    output: Path
    """Folder to create, or its URI. An existing index gets the vectors whose ids it lacks."""
    kind: Kind | None = None
    """Kind of index. exact: the same hits as a comparison with every vector; compressed: searches the nearest clusters
    only, with one bit per value in memory. Default: exact, or the existing index's kind.
    """
    metric: MetricName | None = None
    """Similarity metric: cosine, dot or l2. Default: cosine, or the existing index's metric."""
    name: str | None = None
    """Output of the embedding folders. Default: their first, or the existing index's output."""
