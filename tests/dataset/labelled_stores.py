"""Small labelled tables, and stores made of them."""

from pathlib import Path

from esmeray.dataset.labels.conversion import ensure_labelled_store
from esmeray.dataset.labels.store import LabelledStore
from esmeray.dataset.section import DataSection, LabelsSection, TokenizerSection
from tests.dataset.labels.test_labelled_file import write_table

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


def proteins(folder: Path, *labels: str, name: str = "in.csv") -> Path:
    return write_table(folder / name, ("sequence", "label"), *zip(PROTEINS, labels, strict=False))
