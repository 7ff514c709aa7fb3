"""The compiled part gives what dnaio and xxhash give."""

from __future__ import annotations

import pytest
import xxhash

from common import compiled_code
from dataset.fasta import kernel as fasta_kernel
from dataset.fasta import reader as fasta
from dataset.fasta.kernel import Kernel, load_kernel
from dataset.fasta.plain_fasta import PlainFasta
from dataset.store.conversion import convert
from train_config.schema import IngestSection


@pytest.fixture(scope="module")
def kernel() -> Kernel:
    return load_kernel() or pytest.skip("needs a C++ compiler")


def test_hashes_of_any_length_are_those_of_xxhash(kernel):
    sequence = b"MKVLAGDEST" * 60
    lengths = [*range(600), len(sequence)]
    text = b"".join(b">%d\n%b\n" % (length, sequence[:length]) for length in lengths).replace(b"\n\n", b"\n")
    plain = PlainFasta(kernel)
    records = plain.feed(memoryview(text + b">last\n"))
    assert records.hashes.tolist() == [xxhash.xxh3_64_intdigest(sequence[:length]) for length in lengths]
    assert records.id_hashes.tolist() == [xxhash.xxh3_64_intdigest(b"%d" % length) for length in lengths]


@pytest.mark.parametrize(("letter", "stored"), [("X", True), ("J", False), ("m", False), ("*", False), ("Z", True)])
def test_letters_outside_the_alphabet_are_noticed(kernel, letter, stored):
    text = f">a\n{'MKV' * 30}\n>b\n{'L' * 75}{letter}A\n>c\nM\n".encode()
    records = PlainFasta(kernel).feed(memoryview(text + b">last\n"))
    assert records.all_stored is stored


@pytest.mark.parametrize("policies", [{}, {"duplicate_ids": "rename"}, {"duplicate_ids": "first"}], ids=str)
def test_a_store_holds_the_same_with_and_without_it(tmp_path, kernel, sample, monkeypatch, policies):
    records = sample if not policies else [*sample, *sample[:100]]
    text = "".join(f">{name} of a sample\n{sequence}\n" for name, sequence in records)
    (tmp_path / "in.fasta").write_text(text)
    checksums = []
    for loaded in (kernel, None):
        monkeypatch.setattr(fasta, "load_kernel", lambda loaded=loaded: loaded)
        manifest = convert([str(tmp_path / "in.fasta")], tmp_path / f"store{len(checksums)}", IngestSection(**policies))
        checksums.append((manifest.checksum, manifest.counts))
    assert checksums[0] == checksums[1]


def test_there_is_no_kernel_without_a_compiler(monkeypatch):
    monkeypatch.setattr(compiled_code, "load", lambda source, **constants: None)
    assert fasta_kernel.load_kernel() is None
