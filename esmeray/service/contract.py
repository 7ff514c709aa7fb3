"""Messages of ingress and replicas: plain records, which both import and neither side's room hides."""

from dataclasses import dataclass, field

from numpy.typing import NDArray

from esmeray.dataset.tokens.unknown import ALL_KNOWN, UnknownLetters

CLASSES = "classes"
"""The output of a classifier."""
MASKED, EACH_MASKED, DECODED = "masked", "each_masked", "decoded"
"""Outputs of the service alone: logits of the masked tokens of a sequence (M, K), of each of its residues, masked in
turn (L results of (1, K)), and of residues decoded from latents (L, K)."""

DRAIN_S = 30.0
"""For what is being answered when a replica or the service ends."""


@dataclass(frozen=True)
class About:
    """A served model, for the ingress and for ``/v1/models``.

    Attributes:
        outputs: channels of each, by name.
        vocabulary: tokens of the logits; empty where there are none.
        labels, label_kind: of a classifier, else empty.
        one_token_per_residue: sequences are of residues; else they are any text.
        longest: residues of a sequence at most; None for any.
        tokens: token budget of a batch.
        spaces: identity of what each output's channels mean.
        unknown: letters that the vocabulary lacks.
    """

    name: str
    outputs: dict[str, int]
    vocabulary: tuple[str, ...]
    labels: tuple[str, ...]
    label_kind: str
    one_token_per_residue: bool
    longest: int | None
    fingerprint: str
    device: str
    precision: str
    tokens: int
    random_weights: bool
    spaces: dict[str, str]
    unknown: UnknownLetters = ALL_KNOWN


@dataclass(frozen=True)
class AboutIndex:
    """A served index, for the ingress and for ``/v1/models``.

    Attributes:
        model, output: by which queries are embedded.
        space: identity of what the channels of its vectors mean.
        vectors: how many there are.
        link: address of a neighbour's page, with ``{id}``; empty for UniProt's.
        problem: of its files, for which it can't be searched now; '' for none.
    """

    name: str
    model: str
    output: str
    space: str
    vectors: int
    metric: str
    link: str
    problem: str = ""


@dataclass
class Reply:
    """Results of a call, or why there are none.

    Attributes:
        results: an array for each payload, in their order; (N, D) where each has one vector; scores of neighbours.
        ids: of the neighbours of each payload, by an index.
        space: identity of what channels of the results mean.
        refused: ``overloaded`` (the replica has room after ``retry_after_s``, and now for a request of ``room_tokens``
            of somebody who waits for nothing else), ``model``, ``unavailable`` (out of memory, or damaged files of an
            index), or ``unknown`` (an id, which is the detail).
        statistics: of the replica, for the ingress' metrics.
    """

    results: NDArray | list[NDArray] = field(default_factory=list)
    ids: list[list[str]] = field(default_factory=list)
    space: str = ""
    refused: str = ""
    retry_after_s: int = 0
    room_tokens: int = 0
    detail: str = ""
    statistics: dict[str, float | str] = field(default_factory=dict)
