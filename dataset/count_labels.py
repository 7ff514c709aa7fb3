"""What reading changed, left out or noticed, in words."""

from __future__ import annotations

from dataset.store_format import IngestCounts

COUNT_LABELS = {
    "records_upper_cased": "records with lower-case letters, upper-cased",
    "stops_dropped": "final '*' dropped",
    "j_to_x": "J replaced by X",
    "bad_characters_to_x": "characters outside the alphabet replaced by X",
    "records_skipped_bad_characters": "records skipped for characters outside the alphabet",
    "records_skipped_empty": "records skipped for want of a sequence",
    "records_skipped_duplicate_id": "records skipped for an id that stood before",
    "ids_renamed": "ids renamed because they stood before",
    "records_skipped_missing_label": "records skipped for want of a label",
    "label_values_missing": "numbers missing in records that have others",
    "records_unseen_label": "held-out records left out for a label that training lacks",
    "residues_unseen_label": "held-out residues not judged, whose letter training lacks",
    "held_out_also_in_training": "held-out records whose sequence is in training too, which flatters the figures",
}


UNCHANGED = "every record taken as it stands"


def count_lines(counts: IngestCounts) -> list[str]:
    """One line for everything that was changed, left out or noticed; a single one where nothing was."""
    done = [(getattr(counts, name, 0), label) for name, label in COUNT_LABELS.items()]
    return [f"{number:,} {label}" for number, label in done if number] or [UNCHANGED]
