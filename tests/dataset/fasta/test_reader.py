"""FASTA files are read unchanged from any compression, and every refusal names the line."""

import gzip
import random
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from xopen import xopen

from esmeray.common.errors import DataError
from esmeray.dataset.fasta import reader as fasta
from esmeray.dataset.fasta.reader import FastaSource, files_ignored, find_files
from tests.dataset.stores import zipped

TWO = b">a first\nMKV\nLLA\n>b\nACDEF\n"


def read(*paths: Path) -> list[tuple[str, str]]:
    source = FastaSource([str(path) for path in paths])
    return [
        (header.decode(), sequence.decode())
        for batch in source.batches()
        for header, sequence in zip(batch.records.headers.split(), batch.records.sequences, strict=True)
    ]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_every_compression_gives_the_same_records(tmp_path, suffix):
    path = tmp_path / f"in.fasta{suffix}"
    with xopen(path, "wb", threads=0) as file:
        file.write(TWO)
    expected = [("a first", "MKVLLA"), ("b", "ACDEF")]
    assert read(path) == expected
    assert read(path.rename(tmp_path / "in")) == expected
    members = gzip.compress(b">a first\nMKVLLA\n") + gzip.compress(b">b\nACDEF\n")
    assert read(write(tmp_path / "members.gz", members)) == expected


@settings(max_examples=25, deadline=None)
@given(
    records=st.lists(st.tuples(st.text("abc|_.1", min_size=1), st.text("ACDEFGHIKLM", max_size=60)), min_size=1),
    width=st.integers(1, 30),
    line_end=st.sampled_from(["\n", "\r\n", "\r", "\n\n", " \n"]),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf", b"\n\n"]),
)
def test_what_was_written_is_read_whatever_the_layout(tmp_path_factory, records, width, line_end, mark):
    lines = []
    for header, sequence in records:
        lines += [f">{header}", *(sequence[at : at + width] for at in range(0, len(sequence), width))]
    text = mark + line_end.join(lines).encode()
    for end in (line_end.encode(), b""):
        assert read(write(tmp_path_factory.mktemp("layout") / "in.fasta", text + end)) == records


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.sampled_from([">a x", ">b;c", "MKV", "LLA", "ACDEF"]), min_size=1, max_size=8),
    comments=st.lists(st.tuples(st.integers(0, 9), st.text(";> MKV'#0.", max_size=8)), max_size=4),
    line_end=st.sampled_from(["\n", "\r\n", "\r"]),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    by_lines=st.booleans(),
)
def test_comments_are_left_out_and_counted_wherever_they_stand(
    tmp_path_factory, lines, comments, line_end, mark, by_lines
):
    lines = [">first", "MK", *lines]
    commented = [*lines]
    for at, comment in comments:
        commented.insert(at, f";{comment}")
    folder = tmp_path_factory.mktemp("comments")
    plain = write(folder / "plain.fasta", line_end.join(lines).encode())
    path = write(folder / "in.fasta.gz", gzip.compress(mark + line_end.join([*commented, ""]).encode()))
    with patch.object(fasta, "load_kernel", (lambda: None) if by_lines else fasta.load_kernel):
        source = FastaSource([str(path)])
        records = [record for batch in source.batches() for record in batch.records.sequences]
        assert records == [sequence.encode() for _, sequence in read(plain)]
    assert source.counts.comment_lines == len(comments)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (zipped("xl/workbook.xml"), "an Excel workbook; save it as CSV"),
        (b"\xd0\xcf\x11\xe0", "an Excel workbook"),
        (zipped("a.fasta"), "a zip archive; unpack it"),
        (">a\nMK\n".encode("utf-16"), "text in UTF-16"),
        (b"id,sequence\na,MKV\n", "a table, but FASTA is needed; classifiers read tables"),
        (b"id\tsequence\na\tMKV\n", "a table, but FASTA is needed"),
        (b"\xef\xbb\xbfSequence\nMKV\n", "a table, but FASTA is needed"),
        (b"PAR1", "a table, but FASTA is needed"),
        (b"LOCUS       SCU49845 5028 bp\n", "a GenBank file"),
        (b"ID   12AH_CLOS4     Reviewed;   29 AA.\n", "an EMBL or UniProt entry"),
        (b"CLUSTAL W (1.83)\n\na  MK\n", "a Clustal alignment"),
        (b"# STOCKHOLM 1.0\na MK\n//\n", "a Stockholm alignment"),
        (b" 2 4\na  MKVL\n", "a PHYLIP alignment"),
        (b'[{"id": "a"}]', "JSON; convert it"),
        (b"HEADER    HYDROLASE\n", "a PDB file"),
        (b"data_1ABC\n#\n_entry.id 1ABC\n", "an mmCIF file"),
    ],
)
def test_a_file_of_another_kind_is_named_as_what_it_is(tmp_path, content, kind):
    with pytest.raises(DataError) as raised:
        read(write(tmp_path / "in.fasta", content))
    assert f"in.fasta, line 1: {kind}" in str(raised.value)


def test_batches_run_on_over_files_and_know_where_records_stood(tmp_path, monkeypatch):
    monkeypatch.setattr(fasta, "BATCH_BYTES", 20)
    first = write(tmp_path / "1.fasta", b">a\nMKV\n>b\nMKV\n>c\nMKV\n")
    monkeypatch.setattr(fasta, "CHUNK_BYTES", 7)
    second = write(tmp_path / "2.fasta", b">d\nMKV\n>e\nMKV\n")
    batches = list(FastaSource([str(first), str(second)]).batches())
    assert [batch.records.headers.split() for batch in batches] == [[b"a", b"b", b"c", b"d"], [b"e"]]
    assert batches[0].location(1) == f"{first}, line 3, record 2 'b'"
    assert batches[0].location(3) == f"{second}, line 1, record 1 'd'"
    assert batches[1].location(0) == f"{second}, line 3, record 2 'e'"


def test_folders_and_globs_give_their_files_once_and_in_order(tmp_path):
    for folder in ("deep", ".ipynb_checkpoints"):
        (tmp_path / folder).mkdir()
    paths = [write(tmp_path / name, TWO) for name in ("a.fasta", "b.fa.gz", "deep/c.faa")]
    copy = ".ipynb_checkpoints/a-checkpoint.fasta"
    for name in ("notes.txt", ".hidden.fasta", ".DS_Store", copy):
        write(tmp_path / name, b"left by an editor or a system")
    assert find_files([str(tmp_path)]) == paths
    assert files_ignored([str(tmp_path), str(paths[0])]) == dict.fromkeys((".hidden.fasta", copy, "notes.txt"), 1)
    for number in range(8):
        write(tmp_path / "deep" / f"{number}.md", b"")
    assert files_ignored([str(tmp_path)])["others"] == 6
    assert find_files([str(tmp_path / "*.fa*"), str(paths[0])]) == paths[:2]
    assert find_files([str(tmp_path / "**/*.faa")]) == [paths[2]]
    literal = write(tmp_path / "set[1].fasta", TWO)
    assert find_files([str(literal)]) == [literal], "a name with the characters of globs is first taken as it stands"
    with pytest.raises(DataError, match="no file matches"):
        find_files([str(tmp_path / "*.pep")])


@pytest.mark.parametrize(("suffix", "cut"), [("gz", 0.999), ("bz2", 0.5), ("xz", 0.999), ("zst", 0.5)])
def test_truncated_compression_is_refused(tmp_path, suffix, cut):
    whole = tmp_path / f"whole.fasta.{suffix}"
    letters = random.Random(0).choices("ACDEFGHIKLMNPQRSTVWY", k=20_000)
    with xopen(whole, "wb", threads=0) as file:
        file.write(b">a\n" + "".join(letters).encode() + b"\n")
    content = whole.read_bytes()
    path = write(tmp_path / f"in.fasta.{suffix}", content[: int(cut * len(content))])
    with pytest.raises(DataError, match=r"in\.fasta\.\w+: the compressed file is truncated"):
        read(path)


@pytest.mark.parametrize("error", [MemoryError, ZeroDivisionError])
def test_other_errors_of_the_reading_thread_are_not_called_damage(tmp_path, monkeypatch, error):
    monkeypatch.setattr(fasta.ReadAhead, "_fill", Mock(side_effect=error))
    with pytest.raises(error):
        read(write(tmp_path / "in.fasta.gz", gzip.compress(TWO)))


def test_a_flipped_bit_in_compressed_data_is_refused(tmp_path):
    generator = random.Random(1)
    clean = gzip.compress(b">a\n" + "".join(generator.choices("ACDEFGHIKLMNPQRSTVWY", k=100_000)).encode() + b"\n")
    for _ in range(10):
        damaged = bytearray(clean)
        damaged[generator.randrange(100, len(clean))] ^= 1 << generator.randrange(8)
        with pytest.raises(DataError, match=r"damaged|truncated|outside ASCII|NUL|not FASTA|#"):
            read(write(tmp_path / "in.fasta.gz", bytes(damaged)))


@pytest.mark.parametrize("by_lines", [False, True])
@pytest.mark.parametrize(
    "record",
    [
        b">b\n" + (b"M" * 60 + b"\n") * 140_000,
        b">b\n" + b"M" * (8 << 20) + b"\n",
        b">b " + b"x" * (8 << 20) + b"\nMK\n",
    ],
    ids=["wrapped", "one line", "header"],
)
def test_a_record_that_is_too_long_is_refused_long_before_it_is_read(tmp_path, monkeypatch, record, by_lines):
    monkeypatch.setattr(fasta, "MAX_RESIDUES", 100_000)
    if by_lines:
        monkeypatch.setattr(fasta, "load_kernel", lambda: None)
    source = FastaSource([str(write(tmp_path / "in.fasta", b">a\nMKV\n" + record))])
    with pytest.raises(DataError, match=r"line 3, record 2 'b': a record or header longer than 100,000 characters"):
        list(source.batches())
    assert source.bytes_read < 3 << 20
    # A record with exactly the maximum number of residues is accepted.
    path = write(tmp_path / "fits.fasta", b">a\n" + b"MK\n" * 50_000 + b">b\n" + b"M" * 100_000)
    assert sum(map(len, FastaSource([str(path)]).batches())) == 2


def test_the_checksum_of_a_source_is_of_the_file_on_disk(tmp_path):
    for content in (TWO, gzip.compress(TWO), gzip.compress(TWO) + b"\0" * 1_000_000):
        source = FastaSource([str(write(tmp_path / "in", content))])
        assert sum(map(len, source.batches())) == 2
        (file,) = source.finished
        assert file.xxh128 == xxhash.xxh3_128(content).hexdigest()
        assert source.bytes_read == file.bytes == len(content)
