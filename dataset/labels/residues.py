"""Labels of residues that stand in FASTA files of their own, as biotrainer and FLIP write them.

``labels_file`` has under each header (``>id SET=train VALIDATION=False``) a letter for each residue in place of a
sequence, ``mask_file`` a 1 or a 0 for each, where 0 makes the letter '.'.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from esmeray.common.errors import DataError
from esmeray.dataset.fasta.counts import SourceFile
from esmeray.dataset.fasta.locate import place_of_record
from esmeray.dataset.fasta.reader import FastaSource
from esmeray.dataset.labels.label_space import IGNORED_LETTERS
from esmeray.dataset.labels.values import part
from esmeray.dataset.section import LabelsSection


@dataclass(frozen=True)
class _Entry:
    path: Path
    number: int
    header: str
    letters: str

    @property
    def place(self) -> str:
        return place_of_record(self.path, self.number)


class ResidueLabels:
    """Labels of sequences from ``labels_file`` and ``mask_file``; ``files`` as they were read."""

    def __init__(self, settings: LabelsSection, max_residues: int) -> None:
        """Read the files; raises DataError for repeated ids, masks that don't fit, and headers without a part."""
        assert settings.labels_file is not None
        self.files: list[SourceFile] = []
        self._max_residues = max_residues
        self._entries = self._read(settings.labels_file)
        self._parts: dict[str, str] = {}
        self._wanted: set[str] = set()
        if settings.mask_file is not None:
            masks = self._read(settings.mask_file)
            self._entries = {name: _masked(entry, masks.get(name), settings) for name, entry in self._entries.items()}
        if settings.split_column is not None:
            self._parts = {name: _part_of(entry, settings.split_column) for name, entry in self._entries.items()}

    def letters(self, record_id: str) -> str | None:
        """The labels of a sequence's residues; None where there are none."""
        self._wanted.add(record_id)
        entry = self._entries.get(record_id)
        return None if entry is None else entry.letters

    def part(self, record_id: str) -> str | None:
        """Training, validation or test; None where there are no labels, or the settings name no attribute."""
        return self._parts.get(record_id)

    def without_sequence(self) -> list[_Entry]:
        """Labels that nobody asked for."""
        return [entry for name, entry in self._entries.items() if name not in self._wanted]

    def _read(self, source: str) -> dict[str, _Entry]:
        files = FastaSource([source], self._max_residues)
        entries: dict[str, _Entry] = {}
        for batch in files.batches():
            pairs = zip(batch.records.headers.split(), batch.records.sequences, strict=True)
            for index, (header, letters) in enumerate(pairs):
                origin = batch.origin(index)
                assert origin is not None  # it was read from a file
                entry = _Entry(*origin, header.decode("ascii"), letters.decode("ascii"))
                name = (entry.header.split() or [""])[0]
                if name in entries:
                    raise DataError(
                        f"{entry.place}: the id {name!r} stands already in {entries[name].place}; remove one"
                    )
                entries[name] = entry
        self.files += files.finished
        return entries


def _masked(entry: _Entry, mask: _Entry | None, settings: LabelsSection) -> _Entry:
    if mask is None:
        raise DataError(f"{entry.place}: no mask of this id in {settings.mask_file}; add it, of 1 for all residues")
    if len(mask.letters) != len(entry.letters) or set(mask.letters) - {"0", "1"}:
        raise DataError(
            f"{mask.place}: no mask of {len(entry.letters)} letters ({entry.place}); give each residue a 1, or a 0 "
            "where it is neither to be learnt nor scored"
        )
    pairs = zip(entry.letters, mask.letters, strict=True)
    return replace(entry, letters="".join(letter if known == "1" else IGNORED_LETTERS[0] for letter, known in pairs))


def _part_of(entry: _Entry, attribute: str) -> str:
    attributes = dict(word.split("=", 1) for word in entry.header.split()[1:] if "=" in word)
    if attribute not in attributes:
        raise DataError(f"{entry.place}: no {attribute}= in the header; write for example {attribute}=train")
    try:
        part_name = part(attributes[attribute])
    except ValueError as error:
        raise DataError(f"{entry.place}: {attribute}: {error}") from error
    held_out = attributes.get("VALIDATION", "").lower() == "true"
    return "validation" if held_out and part_name == "training" else part_name
