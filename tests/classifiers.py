"""Tiny classifiers, and labelled files for them."""

from pathlib import Path
from typing import Any

import torch

from esmeray.dataset.targets import LabelSpace
from esmeray.dataset.tokens.base import EsmSequenceTokenizer, SequenceTokenizer, train_bpe
from esmeray.tasks.classifier.model import Classifier, build_classifier
from esmeray.tasks.section import ModelSection
from esmeray.train_config.loading import dump_config
from esmeray.training.config import Config
from tests.model.support import random_sequences

NAMES = {
    "multiclass": ("cytoplasm", "membrane", "nucleus"),
    "binary": ("no", "yes"),
    "multilabel": ("GO:1", "GO:2", "GO:3"),
    "regression": ("stability", "activity"),
    "per_residue": ("C", "E", "H"),
}
TEXTS = ["a cell divides", "the nucleus holds DNA", "membranes are thin", "x"]
_SIZE = {"layers": 2, "hidden_size": 32, "heads": 4}


def tiny_classifier(
    source: str = "esm2_t6_8M", kind: str = "multiclass", seed: int = 0, **settings: Any
) -> tuple[Classifier, SequenceTokenizer]:
    """A classifier with random nonzero weights, in evaluation mode; for text if the source is a decoder.

    ``settings``: dictionaries for ``backbone`` and ``classifier``.
    """
    is_folder = Path(source).is_dir()
    backbone = {"source": source, **({} if is_folder else _SIZE), **settings.get("backbone", {})}
    section = ModelSection.model_validate(
        {"task": "classifier", "backbone": backbone, "classifier": settings.get("classifier", {})}
    )
    for_proteins = is_folder or source in ("esm2_t6_8M", "bert")
    tokenizer: SequenceTokenizer = EsmSequenceTokenizer() if for_proteins else train_bpe(TEXTS, 300)
    model = build_classifier(section, seed, LabelSpace(kind, NAMES[kind]), tokenizer)  # type: ignore[arg-type]
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not name.endswith("embeddings.weight"):
                parameter += 0.05 * torch.randn(parameter.shape, generator=draw)
    return model.eval(), tokenizer


def tiny_model(source: str = "esm2_t6_8M", kind: str = "multiclass", precision: Any = "fp32", **settings: Any) -> Any:
    """The classifier of :func:`tiny_classifier`, opened for inference on the CPU."""
    from esmeray.inference.models.model import Model
    from esmeray.tasks.opening import Opened

    model, tokenizer = tiny_classifier(source, kind, **settings)
    opened = Opened(model.backbone, tokenizer, {"classifier": model})
    about: dict[str, Any] = {"name": "tiny", "task": "classifier", "device": torch.device("cpu")}
    about["content"] = "protein" if isinstance(tokenizer, EsmSequenceTokenizer) else "text"
    return Model(opened, precision=precision, random_weights=True, **about)


def classifier_config(kind: str = "multiclass", content: str = "protein", **data: Any) -> Config:
    settings = {"max_length": 100, **data, "labels": {"kind": kind, **data.get("labels", {})}}
    model = {"task": "classifier", "tokenizer": {"content": content}}
    return Config.model_validate({"data": settings, "model": model})


def export_tiny(folder: Path, config: Config | None = None, **settings: Any) -> Path:
    from esmeray.tasks.classifier.export import export_classifier

    config = classifier_config() if config is None else config
    model, tokenizer = tiny_classifier(kind=config.data.labels.kind, **settings)
    return export_classifier(model, folder, tokenizer, resolved_config=dump_config(config))


def labelled_fasta(path: Path, lengths: list[int], kind: str = "multiclass", seed: int = 0) -> Path:
    """Write sequences of these lengths; the labels alternate, as word 1 of the header."""
    names = NAMES[kind]
    sequences = random_sequences(lengths, seed)
    records = (f">p{n} {names[n % len(names)]}\n{sequence}\n" for n, sequence in enumerate(sequences))
    path.write_text("".join(records))
    return path
