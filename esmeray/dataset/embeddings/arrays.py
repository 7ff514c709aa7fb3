"""Arrays in safetensors files, read by memory mapping. They are written here, since the library's files have mode 0600.

NumPy lacks bf16, so it is stored as uint16.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import xxhash
from numpy.typing import DTypeLike, NDArray

from esmeray.common.errors import DataError, parsing
from esmeray.common.publishing import atomic_file, verified, writing

Arrays: TypeAlias = Mapping[str, NDArray]

_NAMES = {
    **{"float32": "F32", "float16": "F16", "uint16": "BF16"},
    **{"int8": "I8", "int32": "I32", "int64": "I64", "uint64": "U64"},
}
_DTYPES = {name: np.dtype(dtype).newbyteorder("<") for dtype, name in _NAMES.items()}
BLOCKS = ".blocks"
"""Suffix of the file with a file's checksums, one per block."""
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 100_000_000
"""Maximum bytes of a header, as in the safetensors library."""
_BLOCK = 2**16
"""Bytes per checksum. Smaller blocks read less per row; larger blocks keep fewer checksums in memory."""


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write arrays atomically: fp32, fp16, int8, int32, int64, uint64, and bf16 as uint16.

    Raises ResourceError if the disk is full or not writable.
    """
    header = {}
    end = 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    # Pad the header, so that the values are aligned in the mapped file, too.
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with writing(path), atomic_file(path) as temporary, temporary.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).data)


def scratch_array(folder: Path, shape: Sequence[int], dtype: DTypeLike) -> NDArray:
    """Return an array of zeros in an unnamed file, which the system can write to disk when memory is short.

    Raises ResourceError if the disk has too little space.
    """
    with writing(folder), TemporaryFile(dir=folder) as file:
        # Reserve disk space first: a mapped file on a full disk ends the process. An empty file can't be mapped.
        os.posix_fallocate(file.fileno(), 0, max(1, math.prod(shape) * np.dtype(dtype).itemsize))
        return np.memmap(file, dtype, shape=tuple(shape))


def write_checksums(path: Path) -> None:
    """Write the XXH3-64 of each block of a file to a second file, for :class:`CheckedFile`."""
    content = np.memmap(path, np.uint8, "r")
    digests = [xxhash.xxh3_64_intdigest(content[at : at + _BLOCK].data) for at in range(0, len(content), _BLOCK)]
    with writing(path), atomic_file(_checksums(path)) as temporary:
        np.array(digests, "<u8").tofile(temporary)


def _checksums(path: Path) -> Path:
    return path.with_name(f"{path.name}{BLOCKS}")


class CheckedFile:
    """A mapped file whose blocks are verified when they are first read. Few blocks of a large file are ever read.

    Attributes:
        content: the bytes of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content = np.memmap(path, np.uint8, "r")
        self._digests = np.fromfile(verified(_checksums(path)), "<u8")
        blocks = -(-len(self.content) // _BLOCK)
        if len(self._digests) != blocks:  # checked before any page is read
            raise ValueError(f"{len(self._digests):,} checksums for {blocks:,} blocks")
        self._is_checked = np.zeros(len(self._digests), bool)

    def check_range(self, start: int, size: int) -> None:
        """Run :meth:`check` on a range of ``size`` bytes, at least one."""
        self.check(np.append(np.arange(start, start + size, _BLOCK), start + size - 1))

    def check(self, bytes_n: NDArray[np.int64]) -> None:
        """Verify the blocks with bytes at these offsets. Raises DataError if a block has changed."""
        blocks_n = bytes_n // _BLOCK
        for block in np.unique(blocks_n[~self._is_checked[blocks_n]]).tolist():
            if xxhash.xxh3_64_intdigest(self.content[block * _BLOCK :][:_BLOCK].data) != self._digests[block]:
                raise DataError(f"{self._path}: damaged: checksum mismatch in a block; build or copy the folder again")
            self._is_checked[block] = True


class CheckedArray:
    """An array (N, ...) in a :class:`CheckedFile` that verifies rows when they are read."""

    def __init__(self, file: CheckedFile, array: NDArray) -> None:
        self._file = file
        self._array = array
        self.shape = array.shape
        self.dtype = array.dtype
        self._row_bytes = array.itemsize * math.prod(array.shape[1:])
        # One byte in each block that holds a part of the first row.
        within = np.append(np.arange(0, self._row_bytes, _BLOCK), self._row_bytes - 1)
        self._bytes_of_first = array.ctypes.data - file.content.ctypes.data + within

    def __getitem__(self, rows: slice | NDArray[np.integer]) -> NDArray:
        """Return rows. Raises DataError if one of their blocks is damaged."""
        numbers = np.arange(*rows.indices(self.shape[0])) if isinstance(rows, slice) else rows.ravel()
        self._file.check((numbers[:, None] * self._row_bytes + self._bytes_of_first).ravel())
        return self._array[rows]


class RangedArray:
    """An array (N, ...) in a file at a URI that fetches a slice of rows when it is read."""

    def __init__(self, file: BinaryIO, offset: int, shape: Sequence[int], dtype: np.dtype) -> None:
        self.file = file
        self._offset = offset
        self.shape = tuple(shape)
        self.dtype = dtype
        self._row_bytes = dtype.itemsize * math.prod(self.shape[1:])

    def __getitem__(self, rows: slice) -> NDArray:
        """Return rows. Raises ValueError if the file is too short."""
        start, stop, _ = rows.indices(self.shape[0])
        self.file.seek(self._offset + start * self._row_bytes)
        read = self.file.read((stop - start) * self._row_bytes)
        return np.frombuffer(read, self.dtype).reshape(stop - start, *self.shape[1:])


def open_npy(file: Path | BinaryIO) -> NDArray | RangedArray:
    """Open a .npy file, memory-mapped, or fetched by rows from a URI."""
    if isinstance(file, Path):
        mapped: NDArray = np.load(file, mmap_mode="r")
        return mapped
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    return RangedArray(file, file.tell(), shape, dtype)


def open_checked(path: Path) -> dict[str, Any]:
    """Open the arrays of a file with block checksums. Raises DataError if it is missing or damaged."""
    with parsing(path, "build or copy the folder again"):
        file = CheckedFile(path)
        file.check_range(0, 1)  # the block of the header
        return {name: CheckedArray(file, array) for name, array in _arrays_in(file.content).items()}


def open_arrays(file: Path | BinaryIO, where: Path | str | None = None) -> dict[str, Any]:
    """Return the arrays as read-only views of the mapped file. From a URI, ``values`` are fetched by rows.

    ``where`` names the file in messages. Raises DataError if it is missing or truncated.
    """
    with parsing(where or str(file), "remove it and compute it again"):
        if isinstance(file, Path):
            return _arrays_in(np.memmap(file, mode="r", dtype=np.uint8))
        return _arrays_in(RangedArray(file, 0, [file.seek(0, os.SEEK_END)], np.dtype(np.uint8)))


def _arrays_in(content: NDArray[np.uint8] | RangedArray) -> dict[str, Any]:
    """Return the arrays in the bytes of a safetensors file."""
    length = int.from_bytes(content[:8].tobytes(), "little")
    if length > min(_MAX_HEADER_BYTES, content.shape[0] - 8):  # checked before that many bytes are read
        raise ValueError(f"its header claims {length:,} bytes")
    header = json.loads(content[8 : 8 + length].tobytes())
    arrays: dict[str, Any] = {}
    for name, kind in header.items():
        start, end = (8 + length + offset for offset in kind["data_offsets"])
        dtype = _DTYPES[kind["dtype"]]
        arrays[name] = (
            RangedArray(content.file, start, kind["shape"], dtype)
            if name == "values" and isinstance(content, RangedArray)
            else np.asarray(content[start:end]).view(dtype).reshape(kind["shape"])
        )
    return arrays


def arrays_checksum(identity: str, arrays: Arrays) -> str:
    """Return the XXH3-128 of arrays and their identity, hex. Equal data has an equal checksum on all machines."""
    digest = xxhash.xxh3_128(identity.encode())
    for name in sorted(arrays):
        # Include shape and dtype: equal bytes may be different values.
        digest.update(f"{name} {arrays[name].dtype.str} {arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).data)
    return digest.hexdigest()


def rows_of(arrays: Arrays, index: int) -> NDArray:
    """Return the rows of ``values`` between an item's ``offsets``. Raises ValueError if rows are missing."""
    start, stop = arrays["offsets"][index : index + 2].tolist()
    # NumPy would silently cut a slice that ends after the array.
    num_rows = arrays["values"].shape[0]
    if not 0 <= start <= stop <= num_rows:
        raise ValueError(f"rows {start} to {stop} requested, but it has {num_rows}")
    return arrays["values"][start:stop]


def as_float32(values: NDArray, scales: NDArray | None = None) -> NDArray[np.float32]:
    """Dequantize stored values to fp32: cast bf16, multiply int8 by the scale of each channel."""
    # bf16 is the upper half of fp32.
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << 16).view(np.float32)
    wide = values.astype(np.float32, copy=False)
    return wide if scales is None else wide * scales


def as_stored(values: NDArray[np.float32], dtype: str) -> NDArray:
    """Cast fp32 values that were read from an fp32, fp16 or bf16 file back to that dtype, without loss."""
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16 if dtype == "fp16" else np.float32, copy=False)


def quantized(values: NDArray[np.float32], scales: NDArray[np.float32]) -> NDArray[np.int8]:
    """Quantize fp32 to int8, symmetrically: divide by the scale of each channel and round to nearest."""
    # -127 rather than -128, so that a value and its negative have the same rounding error.
    return np.rint(values / scales).clip(-127, 127).astype(np.int8)


def scales_of(largest: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the scale of each channel from its largest absolute value; 1 for a channel of zeros."""
    return np.where(largest > 0, largest / 127, 1).astype(np.float32)
