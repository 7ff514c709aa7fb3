"""Small labelled tables, and stores made of them."""

from pathlib import Path

from safetensors.numpy import load_file, save_file

from common.publishing import file_xxh128
from dataset.labels.conversion import ensure_labelled_store
from dataset.labels.store import LABELS_FILE, MANIFEST_FILE, LabelledStore
from dataset.store.format import signed_json
from tests.dataset.labels.test_labelled_file import write_table
from train_config.classifier_schema import LabelsSection, TokenizerSection
from train_config.schema import DataSection

PROTEINS = ["MK", "MKV", "MKL", "MKA", "MKC", "MKD", "MKE", "MKF"]
TEXT = TokenizerSection(content="text")


def data_of(*sources: Path, store: Path | None = None, share: float = 0.25, **labels) -> DataSection:
    return DataSection(
        source=[str(source) for source in sources],
        store=None if store is None else str(store),
        validation_share=share,
        labels=LabelsSection(**labels),
    )


def made(data: DataSection, root: Path, tokenizer: TokenizerSection | None = None) -> LabelledStore:
    return LabelledStore(ensure_labelled_store(data, tokenizer or TokenizerSection(), root), verify="full")


def rewrite_as_version_1(labelled: LabelledStore) -> None:
    """Make of a store of sparse targets one as earlier versions wrote it, in place."""
    assert labelled.manifest.format_version == 2
    tensors = {name: values for name, values in load_file(labelled.path / LABELS_FILE).items() if name == "parts"}
    (labelled.path / LABELS_FILE).unlink()
    save_file(tensors | {"targets": labelled.targets[:]}, labelled.path / LABELS_FILE)
    files = labelled.manifest.files | {LABELS_FILE: file_xxh128(labelled.path / LABELS_FILE)}
    older = labelled.manifest.model_copy(update={"format_version": 1, "files": files})
    (labelled.path / MANIFEST_FILE).write_text(signed_json(older))


def proteins(folder: Path, *labels: str, name: str = "in.csv") -> Path:
    return write_table(folder / name, ("sequence", "label"), *zip(PROTEINS, labels, strict=False))
