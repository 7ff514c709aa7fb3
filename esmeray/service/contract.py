"""Messages between the ingress and the replicas: plain records that both sides import."""

from dataclasses import dataclass, field
from typing import NamedTuple

from numpy.typing import NDArray

from esmeray.dataset.fasta.alphabet import ALL_KNOWN, UnknownLetters
from esmeray.dataset.structures.store import Structure
from esmeray.inference.calibration import Calibration

CLASSES, LIKELIHOOD = "classes", "pseudo_log_likelihood"
"""Names of a classifier's output, and of the output that takes a pass per residue."""
DESIGNS = "designs"
"""Name of the output of a model that designs sequences: a record per design."""
MASKED, EACH_MASKED, DECODED = "masked", "each_masked", "decoded"
"""Outputs that only the service has, all of them logits: for the M masked tokens of a sequence (M, K), for each residue
masked in turn (L results of (1, K)), and for residues decoded from latents (L, K)."""

REQUESTS = 512
"""Maximum number of concurrent requests of an ingress replica."""
DRAIN_S = 30.0
"""Seconds to finish ongoing requests when a replica or the service ends."""


@dataclass(frozen=True)
class About:
    """A served model, for the ingress and for ``/v1/models``.

    Attributes:
        outputs: number of channels by output name.
        vocabulary: tokens of the logits; empty if the model has no logits.
        labels, label_kind: classes of a classifier and their kind; otherwise empty.
        one_token_per_residue: True for protein sequences, False for any text.
        longest: maximum number of residues of a sequence; None for no maximum.
        tokens: token budget of a batch.
        spaces: identity of the vector space of each output; vectors are comparable if it is equal.
        unknown: letters that the vocabulary lacks.
        calibration: calibration of the classes; None without one.
        notes: lines on published weights, for readers of results.
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
    calibration: Calibration | None = None
    notes: tuple[str, ...] = ()


class DesignOrder(NamedTuple):
    """One design for a structure; see :class:`~esmeray.inference.design.sampling.Request`.

    Attributes:
        key: digest of the request without the number of designs.
        number: number of the design among the designs of the seed, from 0.
    """

    key: bytes
    structure: Structure
    fixed: tuple[int, ...]
    bias: NDArray
    tied: tuple[tuple[int, ...], ...]
    temperature: float
    seed: int
    number: int


@dataclass(frozen=True)
class AboutIndex:
    """A served index, for the ingress and for ``/v1/models``.

    Attributes:
        model, output: the model and its output that embed the queries.
        space: identity of the vector space of the index, as in :class:`About`.
        vectors: number of vectors.
        link: address of a neighbour's page, with ``{id}``; empty for UniProt.
        problem: why the index can't be searched now; empty if it can.
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
        results: one array per payload, in order; (N, D) if each payload has one vector; scores for an index.
        ids: for an index, the ids of the neighbours per payload.
        space: identity of the vector space of the results.
        refused: ``overloaded``, ``model`` (the model's results are not finite), ``unavailable`` (out of memory, or the
            files of an index are damaged) or ``unknown`` (no such id in the index); empty if answered.
        retry_after_s: for ``overloaded``: seconds until the replica has room.
        room_tokens: for ``overloaded``: tokens that another caller, who has nothing queued, could send now.
        detail: text of the refusal; for ``unknown`` the id.
        statistics: counters of the replica for the ingress' metrics.
    """

    results: NDArray | list[NDArray] = field(default_factory=list)
    ids: list[list[str]] = field(default_factory=list)
    space: str = ""
    refused: str = ""
    retry_after_s: int = 0
    room_tokens: int = 0
    detail: str = ""
    statistics: dict[str, float | str] = field(default_factory=dict)
