"""A structure store is complete or absent, is identified by its content, and detects damage."""

from pathlib import Path
from threading import Timer

import numpy as np
import pytest
from pydantic import ValidationError

from esmeray.common.errors import ConfigError, DataError
from esmeray.dataset.embeddings import cache as shards
from esmeray.dataset.embeddings.cache import write_shard
from esmeray.dataset.section import DataSection
from esmeray.dataset.structures.conversion import convert_structures, ensure_structure_store
from esmeray.dataset.structures.predictions import Predicted, PredictedStructures, keep
from esmeray.dataset.structures.store import ARRAYS_FILE, StructureStore
from tests.damage import flipped
from tests.dataset.stores import write_fasta
from tests.structures import folds, pdb_lines, structure_store, write_pdb

FOLDS = folds(3)
SEQUENCES = [fold.residues for fold in FOLDS]
PREDICTED = [Predicted(fold.coordinates, np.full(len(fold.residues), 71.0, np.float32)) for fold in FOLDS]


def test_a_store_holds_what_the_files_do(tmp_path: Path):
    (tmp_path / "in").mkdir()
    for fold in FOLDS:
        write_pdb(tmp_path / "in" / f"{fold.id}.pdb", pdb_lines(fold))
    labels = tmp_path / "labels.csv"
    data = DataSection(structures={"labels": str(labels)}, validation_share=0.4)
    for row, words in (("x_A,y", "only 0 of 3 ids match"), (",helix", "row 3: column 'id' is empty; add an id")):
        labels.write_text(f"id,label\nx_B,y\nx_C,y\n{row}\n")
        with pytest.raises(DataError, match=words):
            convert_structures([str(tmp_path / "in")], tmp_path / "store", data)
    labels.write_text(f"id,label\n{FOLDS[0].id}_A,helix\n{FOLDS[2].id}_A,barrel\n")
    convert_structures([str(tmp_path / "in")], tmp_path / "store", data)
    store = StructureStore(tmp_path / "store", verify="full")
    assert [store.store.text(index) for index in range(3)] == [fold.residues for fold in FOLDS]
    assert store.manifest.label_names == ["barrel", "helix"] and store.labels.tolist() == [1, -1, 0]
    assert sorted([*store.training, *store.validation]) == [0, 1, 2] and store.validation.size
    for index, fold in enumerate(FOLDS):
        atoms, confidence, chains = store.atoms(index, 2, 20)
        wanted = fold.coordinates - fold.coordinates[:, 1].mean(0)
        np.testing.assert_allclose(atoms, wanted[2:22], atol=0.04)
        assert confidence.tolist() == [100] * 20 and chains.tolist() == [0] * 20
        assert store.structure(index).residue_labels == [str(number) for number in range(1, len(fold.residues) + 1)]


def test_a_store_is_found_again_and_made_anew_for_other_settings(tmp_path: Path):
    data = DataSection(sample={"records": 3})
    first = ensure_structure_store(data, tmp_path)
    made = (first / ARRAYS_FILE).stat().st_mtime_ns
    assert ensure_structure_store(data, tmp_path) == first and (first / ARRAYS_FILE).stat().st_mtime_ns == made
    assert ensure_structure_store(data.model_copy(update={"validation_share": 0.5}), tmp_path) != first
    ready = data.model_copy(update={"source": [str(first)]})
    assert ensure_structure_store(ready, tmp_path / "elsewhere") == first


def test_damage_and_existing_targets_are_refused(tmp_path: Path):
    store = structure_store(tmp_path / "store", 4)
    path = store.path / ARRAYS_FILE
    with flipped(path, 8 * (path.stat().st_size - 200)), pytest.raises(DataError, match="damaged"):
        StructureStore(store.path)
    with pytest.raises(ConfigError, match="exists"):
        convert_structures(["sample"], store.path, DataSection())


def test_all_refused_files_are_named_together(tmp_path: Path):
    for name in ("a.pdb", "b.pdb"):
        (tmp_path / name).write_text("HEADER\n")
    with pytest.raises(DataError, match=r"2 files refused.*a\.pdb.*b\.pdb"):
        convert_structures([str(tmp_path)], tmp_path / "store", DataSection())


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Predictions of the first two of three folds."""
    keep(tmp_path / "predictions" / "model-1", SEQUENCES[:2], PREDICTED[:2])
    return tmp_path / "predictions"


@pytest.fixture
def fasta(tmp_path: Path) -> Path:
    return write_fasta(tmp_path / "proteins.fasta", [(fold.id, fold.residues) for fold in FOLDS])


def test_sequences_without_structures_are_refused_as_structures(tmp_path: Path, cache: Path, fasta: Path):
    with pytest.raises(DataError, match=r"predict structures with 'esmeray design fold --fold.input \S+fasta'"):
        convert_structures([str(fasta)], tmp_path / "store", DataSection())
    with pytest.raises(DataError, match="no structures for 1 of 3 proteins"):
        convert_structures([str(fasta)], tmp_path / "store", DataSection(predictions={"folder": str(cache)}))
    assert not (tmp_path / "store").exists()


def test_sequences_get_predicted_structures(tmp_path: Path, cache: Path, fasta: Path):
    path = ensure_structure_store(DataSection(source=[str(fasta)]), tmp_path)
    unknown = StructureStore(path)
    assert np.isnan(unknown.atoms(1, 0, 30)[0]).all() and unknown.unknown_records.tolist() == [0, 1, 2]
    store = StructureStore(path, predictions=PredictedStructures(cache, "null"))
    atoms, confidence, _ = store.atoms(1, 4, 30)
    np.testing.assert_allclose(atoms, (FOLDS[1].coordinates - FOLDS[1].coordinates[:, 1].mean(0))[4:34], atol=0.06)
    assert confidence.tolist() == [71] * 30 and np.isnan(store.atoms(2, 0, 9)[0]).all()
    waiting = PredictedStructures(cache, "wait", longest=1000)
    later = Timer(0.3, keep, (cache / "model-1", SEQUENCES[2:], PREDICTED[2:]))
    later.start()
    assert np.isfinite(StructureStore(path, predictions=waiting).atoms(2, 0, 9)[0]).all() and waiting.hit_rate == 0
    later.join()


def test_predictions_of_two_models_or_without_a_folder_are_refused(cache: Path):
    keep(cache / "model-2", SEQUENCES[:1], PREDICTED[:1])
    with pytest.raises(DataError, match="predictions of model-1, model-2"):
        PredictedStructures(cache, "null")
    with pytest.raises(ValidationError, match="set folder"):
        DataSection(predictions={"on_miss": "wait"})


def test_shards_removed_while_they_are_opened_are_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = np.array([[3, 1], [7, 2]], dtype=np.uint64)
    rows = [np.zeros((4, 13), np.float16)] * 2
    for number in range(2):
        write_shard(tmp_path, f"small{number}", keys, rows)
    write_shard(tmp_path, "zmerged", keys, rows)
    open_arrays = shards.open_arrays

    def removed_first(path: Path):
        if "small" in path.name:
            path.unlink()
        return open_arrays(path)

    monkeypatch.setattr(shards, "open_arrays", removed_first)
    assert PredictedStructures(tmp_path).has(keys).all()
