"""Proteins as text to mean embeddings: tokenization, the forward pass of ESM-2 and pooling, beside three peers.

All contenders have the same random weights and take the same real proteins: spread over the lengths of the file, with
the longest among them, cropped to 1022 residues, in the file's order. (a) transformers as its documentation shows it:
fp32 (on CUDA fp16), EsmTokenizer, padded batches of 16 in the order of the file. (b) transformers tuned by hand: sorted
by length, bf16 weights or autocast and the batch size that a search before the timing finds fastest on this machine.
(c) fair-esm's extract script, at its 4096 tokens a batch, without writing files. Ours runs in bf16. Before anything is
timed, our fp32 path must agree with (a) in fp32 to 1e-4 relative, and every contender with it to a cosine of 0.999 for
each protein.

On CUDA, ESM-2 650M is also measured in FLOP/s (:func:`benchmarks.harness.models.forward_flops`), beside the rate at
which a large bf16 matrix product runs in the same rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from benchmarks.harness.proteins import Proteins, read_proteins, spread_by_length
from benchmarks.harness.stage import Case, Comparison, Contender, Device, Facts, Setting, Stage, WrongWorkError

if TYPE_CHECKING:
    from torch import Tensor

    from benchmarks.harness.models import Embedder

PROTEINS = {"cpu": {"ESM-2 8M": 240, "ESM-2 35M": 80}, "cuda": {"ESM-2 8M": 2_000, "ESM-2 35M": 2_000}}
"""On the CPU fewer for the larger model: the slowest peer takes half a second a protein there."""

LARGE_PROTEINS = 1_000
QUICK_PROTEINS, QUICK_RESIDUES = 6, 60
SHORT_PROTEINS = 12
SEARCH_PROTEINS = {"cpu": 32, "cuda": 512}
CHECKED_PROTEINS = 24

RELATIVE_TOLERANCE = 1e-4
LEAST_COSINE = 0.999

OURS = "esmeray, bf16"
DOCUMENTED = "transformers as documented, fp32"
DOCUMENTED_HALF = "transformers as documented, fp16"
TUNED = "transformers tuned by hand"
FAIR_ESM = "fair-esm extract"
PEAK = "bf16 matrix product"

CASES = {"ESM-2 8M": ("esm2_t6_8M", 3), "ESM-2 35M": ("esm2_t12_35M", 3)}
LARGE_CASE, LARGE_SIZE = "ESM-2 650M", "esm2_t33_650M"
PEAK_SIZE, PEAK_REPEATS = 8192, 20


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    for name, (size, rounds) in list(CASES.items())[: 1 if setting.quick else None]:
        sequences = spread_by_length(proteins.sequences, PROTEINS[setting.device][name])
        if setting.quick:
            sequences = [sequence[:QUICK_RESIDUES] for sequence in sequences[:QUICK_PROTEINS]]
        yield _case(name, size, rounds, setting, proteins, sequences)
    if setting.device == "cuda":
        yield _large_case(setting, proteins, spread_by_length(proteins.sequences, LARGE_PROTEINS))


def _case(name: str, size: str, rounds: int, setting: Setting, proteins: Proteins, sequences: Sequence[str]) -> Case:
    import torch

    from benchmarks.harness.models import MAX_TOKENS, our_embedder, random_network, save_weights
    from benchmarks.peers.fair_esm_extract import FairEsmExtract
    from benchmarks.peers.transformers_embedding import (
        SEARCHED_BATCHES,
        TransformersEmbedder,
        documented,
        search_tuning,
    )

    device = setting.device
    network = random_network(size)
    folder = save_weights(network, setting.folder / size)
    setting.note(f"{name} · searching the peer's best batch size")
    searched = sequences[:: max(1, len(sequences) // SEARCH_PROTEINS[device])]
    batch_sizes = SEARCHED_BATCHES[device][:1] if setting.quick else SEARCHED_BATCHES[device]
    tuning = search_tuning(folder, device, searched, batch_sizes)
    ours = our_embedder(folder, device, torch.bfloat16)
    peers: dict[str, Embedder] = {
        _documented_name(device): TransformersEmbedder(folder, device, documented(device)),
        TUNED: TransformersEmbedder(folder, device, tuning),
        FAIR_ESM: FairEsmExtract(network, device),
    }
    short = sequences[:: max(1, len(sequences) // SHORT_PROTEINS)]

    def contender(label: str, embedder: Embedder, warm: Sequence[str]) -> Contender:
        return Contender(label, lambda: len(embedder(sequences)), short=lambda: len(embedder(warm)))

    def check() -> Facts:
        some = sequences[:: max(1, len(sequences) // CHECKED_PROTEINS)]
        reference = TransformersEmbedder(folder, device, documented("cpu"))(some)
        exact = our_embedder(folder, device, torch.float32)(some)
        return _check(reference, exact, {OURS: ours(some), **{label: peer(some) for label, peer in peers.items()}})

    # Ours is warmed up on all sequences: batches of other shapes would be compiled in the timed rounds.
    contenders = [contender(OURS, ours, sequences)]
    contenders += [contender(label, peer, short) for label, peer in peers.items()]
    facts = _facts(proteins, sequences) | {
        "tuned by hand": str(tuning),
        "tokens of our batches": MAX_TOKENS[device],
    }
    return Case(name, "proteins/s", tuple(contenders), rounds=rounds, check=check, facts=facts)


def _large_case(setting: Setting, proteins: Proteins, sequences: Sequence[str]) -> Case:
    """ESM-2 650M in FLOP/s of real tokens, beside what the device does at best."""
    import torch

    from benchmarks.harness.models import MAX_TOKENS, forward_flops, our_embedder, random_network, save_weights
    from benchmarks.peers.transformers_embedding import TransformersEmbedder, documented

    device = setting.device
    network = random_network(LARGE_SIZE)
    folder = save_weights(network, setting.folder / LARGE_SIZE)
    ours = our_embedder(folder, device, torch.bfloat16)
    peer = TransformersEmbedder(folder, device, documented(device))
    teraflops = forward_flops(network, sequences) / 1e12
    some = sequences[:: max(1, len(sequences) // CHECKED_PROTEINS)]

    def contender(label: str, embedder: Embedder, warm: Sequence[str]) -> Contender:
        def work(chosen: Sequence[str], chosen_teraflops: float) -> float:
            embedder(chosen)
            return chosen_teraflops

        warm_teraflops = forward_flops(network, warm) / 1e12
        return Contender(label, lambda: work(sequences, teraflops), short=lambda: work(warm, warm_teraflops))

    def check() -> Facts:
        reference = TransformersEmbedder(folder, device, documented("cpu"))(some)
        exact = our_embedder(folder, device, torch.float32)(some)
        return _check(reference, exact, {OURS: ours(some), DOCUMENTED_HALF: peer(some)})

    return Case(
        LARGE_CASE,
        "TFLOP/s",
        (
            contender(OURS, ours, sequences),
            contender(DOCUMENTED_HALF, peer, some),
            _matrix_product(device),
        ),
        check=check,
        facts=_facts(proteins, sequences) | {"tokens of our batches": MAX_TOKENS[device]},
    )


def _matrix_product(device: Device) -> Contender:
    """What the device does at best: one large bf16 product after the other."""
    import torch

    matrix = torch.randn(PEAK_SIZE, PEAK_SIZE, device=device, dtype=torch.bfloat16)

    def product() -> float:
        for _ in range(PEAK_REPEATS):
            torch.matmul(matrix, matrix)
        return PEAK_REPEATS * 2 * PEAK_SIZE**3 / 1e12

    return Contender(PEAK, product)


def _documented_name(device: str) -> str:
    return DOCUMENTED_HALF if device == "cuda" else DOCUMENTED


def _facts(proteins: Proteins, sequences: Sequence[str]) -> Facts:
    return {
        **proteins.facts,
        "proteins embedded": len(sequences),
        "residues embedded": sum(map(len, sequences)),
        "longest in residues": max(map(len, sequences)),
    }


def _check(reference_ND: Tensor, exact_ND: Tensor, others: dict[str, Tensor]) -> Facts:
    """Hold our results to the reference in fp32; say how near the peers are to it."""
    from torch.nn.functional import cosine_similarity

    scale = reference_ND.abs().max()
    difference = float((exact_ND - reference_ND).abs().max() / scale)
    if not difference <= RELATIVE_TOLERANCE:
        raise WrongWorkError(f"our fp32 embeddings differ from transformers' by {difference:.1e} relative")
    facts: Facts = {"largest relative difference to transformers, fp32": difference}
    for label, other_ND in others.items():
        cosine = float(cosine_similarity(reference_ND.double(), other_ND.double()).min())
        if not cosine >= LEAST_COSINE:
            raise WrongWorkError(f"the embeddings of {label} have a cosine of {cosine:.5f} to transformers' in fp32")
        facts[f"least cosine to transformers in fp32, {label}"] = round(cosine, 6)
    return facts


STAGE = Stage(
    name="embedding",
    summary="proteins to mean embeddings, beside transformers as documented and tuned, and fair-esm's extract",
    cases=_cases,
    comparisons=(
        *(
            comparison
            for name, least_tuned in (("ESM-2 8M", 1.3), ("ESM-2 35M", 1.5))
            for comparison in (
                Comparison(name, OURS, DOCUMENTED, {"cpu": 8.0}),
                Comparison(name, OURS, DOCUMENTED_HALF),
                Comparison(name, OURS, TUNED, {"cpu": least_tuned}),
                Comparison(name, OURS, FAIR_ESM, {"cpu": 8.0}),
            )
        ),
        Comparison(LARGE_CASE, OURS, PEAK, {"cuda": 0.5}),
        Comparison(LARGE_CASE, OURS, DOCUMENTED_HALF, {"cuda": 5.0}),
    ),
    packages=("transformers", "esm"),
    distributions=("fair-esm", "tokenizers"),
)
