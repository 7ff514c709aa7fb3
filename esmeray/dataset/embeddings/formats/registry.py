"""Embedding formats by name. To add one, add a line here or an entry point of another package."""

from esmeray.common.errors import ConfigError
from esmeray.dataset.embeddings.formats.arrays import Npy, Safetensors
from esmeray.dataset.embeddings.formats.arrow import Lance, Parquet
from esmeray.dataset.embeddings.formats.base import Format
from esmeray.dataset.embeddings.formats.hdf5 import Hdf5
from esmeray.installation import added, expect


def _checked(name: str, kind: type[Format]) -> Format:
    made = kind()
    expect(made, Format, "it")
    for attribute, of_type in (("name", str), ("suffix", str), ("holds", frozenset), ("dtypes", tuple), ("read", type)):
        expect(getattr(made, attribute), of_type, attribute)
    if made.name != name:
        # Manifests refer to formats by this name.
        raise ConfigError(f"name is {made.name!r}")
    return made


FORMATS: dict[str, Format] = {kind.name: kind for kind in (Parquet(), Npy(), Hdf5(), Safetensors(), Lance())}
FORMATS |= added("formats", tuple(FORMATS), type, _checked)

TABLE_FORMATS = [name for name, kind in FORMATS.items() if "protein" in kind.holds and not kind.has_keys]
"""Names of formats that store a table of vectors, without named datasets; joining supports these."""
