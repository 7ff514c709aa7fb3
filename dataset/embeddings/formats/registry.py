"""The formats of embeddings, by name: a new one is a line here, or an entry point of another package."""

from typing import TYPE_CHECKING, Literal, TypeAlias

from esmeray.dataset.embeddings.formats.base import Format
from esmeray.dataset.embeddings.formats.hdf5 import Hdf5
from esmeray.dataset.embeddings.formats.lance import Lance
from esmeray.dataset.embeddings.formats.npy import Npy
from esmeray.dataset.embeddings.formats.parquet import Parquet
from esmeray.dataset.embeddings.formats.safetensors import Safetensors
from esmeray.installation import added

FORMATS: dict[str, Format] = {kind.name: kind for kind in (Parquet(), Npy(), Hdf5(), Safetensors(), Lance())}
FORMATS |= {name: kind() for name, kind in added("formats", tuple(FORMATS)).items()}

if TYPE_CHECKING:
    VectorFormat: TypeAlias = str
    TableFormat: TypeAlias = str
else:
    VectorFormat = Literal[tuple(name for name, kind in FORMATS.items() if "protein" in kind.holds)]
    """Names of the formats of vectors of proteins, as settings take them."""
    TableFormat = Literal[tuple(name for name in VectorFormat.__args__ if not FORMATS[name].has_keys)]
    """Of these, those that need no names of datasets, as joining takes them."""
