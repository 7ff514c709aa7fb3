"""A labelled store gives back what it was made of, and refuses what is damaged or belongs to another."""

import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from esmeray.common.errors import DataError
from esmeray.dataset.labels.store import LabelledStore
from tests.dataset.labelled_stores import TEXT, data_of, made, proteins
from tests.dataset.labels.test_labelled_file import write_table


@settings(max_examples=10, deadline=None)
@given(texts=st.lists(st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip), min_size=2, max_size=30))
def test_any_text_comes_back_from_the_store(tmp_path_factory, texts):
    folder = tmp_path_factory.mktemp("texts")
    rows = [(text, "xy"[index % 2]) for index, text in enumerate(texts)]
    path = write_table(folder / "in.csv", ("sequence", "label"), *rows)
    labelled = made(data_of(path, share=0.0), folder, TEXT)
    assert [labelled.store.text(index) for index in range(len(labelled))] == texts
    assert labelled.store.is_text
    assert labelled.store.lengths.tolist() == [len(text.encode()) for text in texts]
    assert [labelled.label_space.names[target] for target in labelled.targets] == [label for _, label in rows]


def test_the_same_records_have_the_same_checksum_wherever_they_come_from(tmp_path, table):
    (tmp_path / "b").mkdir()
    other = proteins(tmp_path / "b", *"xyxyxyxy", name="in.tsv")
    assert made(data_of(other), tmp_path).checksum == made(data_of(table), tmp_path).checksum
    assert made(data_of(table, share=0.0), tmp_path).checksum != made(data_of(table), tmp_path).checksum
    proteins(tmp_path, *"xyxyxyxx")
    assert made(data_of(table), tmp_path).checksum != made(data_of(other), tmp_path).checksum


@pytest.mark.parametrize("name", ["labels.safetensors", "label_mappings.json", "labels.json", "sequences/data.mdb"])
def test_damage_is_noticed_when_a_store_is_opened(tmp_path, table, name):
    path = made(data_of(table), tmp_path).path
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 4
    (path / name).unlink()
    (path / name).write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        LabelledStore(path, verify="full")


def test_sequences_of_another_store_and_other_folders_are_refused(tmp_path, table):
    path = made(data_of(table), tmp_path).path
    other = made(data_of(proteins(tmp_path, *"xyxy", name="other.csv")), tmp_path).path
    shutil.rmtree(path / "sequences")
    shutil.copytree(other / "sequences", path / "sequences")
    with pytest.raises(DataError, match=r"not the sequences that labels\.json was made for"):
        LabelledStore(path)
    with pytest.raises(DataError, match="no such folder; give the folder of a labelled store"):
        LabelledStore(tmp_path / "missing")
    with pytest.raises(DataError, match=r"not a labelled store, it has no labels\.json"):
        LabelledStore(path / "sequences")
