"""Ids and texts of FASTA files and tables to predict, some thousand records at a time, in their order.

Residues and ids are checked by the policies of the config as for training (:mod:`dataset.store.ingest`). Memory holds
one part, and 8 bytes for each id, to detect one that repeats.
"""

from collections.abc import Iterator
from typing import NamedTuple

from dataset.fasta.counts import IngestCounts
from dataset.labels.labelled_file import find_labelled_files
from dataset.labels.parts import LabelledSource, texts_of
from dataset.store.ingest import Ingest
from train_config.classifier_schema import LabelsSection, TokenizerSection
from train_config.schema import IngestSection


class TextPart(NamedTuple):
    """Records in a row with ids unique among all parts, and the share of the files' bytes read by then, 0 to 1."""

    ids: list[str]
    texts: list[str]
    share: float


class TextStream:
    """Files, folders and globs to predict; raises DataError for a name of nothing that can be read."""

    def __init__(
        self, sources: list[str], labels: LabelsSection, tokenizer: TokenizerSection, ingest: IngestSection
    ) -> None:
        self._source = LabelledSource(find_labelled_files(sources), labels, tokenizer.content, with_labels=False)
        self._ingest = Ingest(ingest, self._source.places, content=tokenizer.content)

    @property
    def counts(self) -> IngestCounts:
        """Records that were changed or left out so far."""
        return self._ingest.counts

    def chunks(self, characters: int) -> Iterator[TextPart]:
        """Parts put together until they have at least so many characters; see :meth:`__iter__`."""
        ids: list[str] = []
        texts: list[str] = []
        size, share = 0, 0.0
        for part in self:
            ids += part.ids
            texts += part.texts
            size, share = size + sum(map(len, part.texts)), part.share
            if size >= characters:
                yield TextPart(ids, texts, share)
                ids, texts, size = [], [], 0
        if ids:
            yield TextPart(ids, texts, share)

    def __iter__(self) -> Iterator[TextPart]:
        """Yield the records that stay, in order, up to the first that is refused; iterate once.

        Raises DataError for a file that can't be read, or once all are read with every record that is refused.
        """
        bytes_total = max(1, self._source.bytes_total)
        for _, _, block in self._source.cleaned(self._ingest):
            if block is not None and not self._ingest.faults:
                ids = [record_id.decode("utf-8") for record_id in block.ids.split()]
                yield TextPart(ids, texts_of(block), min(1.0, self._source.bytes_read / bytes_total))
