"""Settings of an index of vectors."""

from pathlib import Path
from typing import Literal

from esmeray.inference.index.metric import MetricName
from esmeray.train_config.section import PositiveInt, Section

Kind = Literal["exact", "compressed"]


class IndexSection(Section):
    """The index to make, or to extend."""

    output: Path
    """Folder to make, or the URI of one. An index that is there gets the vectors whose ids it lacks."""
    kind: Kind | None = None
    """exact: hits as a comparison with every vector gives them; compressed: the nearest clusters alone, by one bit a
    value in memory. Default: exact, or that of the index that is there."""
    metric: MetricName | None = None
    """Measure by which proteins are near: cosine, dot or l2. Default: cosine, or that of the index that is there."""
    name: str | None = None
    """Output of the folders. Default: their first, or that of the index that is there."""
    lists: PositiveInt | None = None
    """Clusters of a compressed index. Default: 4 times the square root of the vectors, at most one for 39."""
