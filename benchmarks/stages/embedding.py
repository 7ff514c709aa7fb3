"""Proteins as text to mean embeddings: tokenization, the forward pass of ESM-2 and pooling, beside three peers.

All contenders have the same random weights and take the same real proteins: spread over the lengths of the file, with
the longest among them, cropped to 1022 residues, in the file's order. (a) transformers as its documentation shows it:
fp32 (on CUDA fp16), EsmTokenizer, padded batches of 16 in the order of the file. (b) transformers tuned by hand: sorted
by length, bf16 weights or autocast and the batch size that a search before the timing finds fastest on this machine.
(c) fair-esm's extract script, at its 4096 tokens a batch, without writing files. Ours runs in bf16. Before anything is
timed, our fp32 path must agree with (a) in fp32 to 1e-4 relative, and every contender with it to a cosine of 0.999 for
each protein.

Peak memory is that of a process for each contender, at equal tokens a batch: the peers take 16 proteins, ours as many
tokens as those have on average. It is the peak while embedding, weights included, less what the libraries take: on the
CPU resident memory, on CUDA what torch has allocated. fair-esm is left out, since its batches can't be set to a number
of proteins.

On CUDA, ESM-2 650M is also measured in FLOP/s (:func:`benchmarks.harness.models.forward_flops`), beside the rate at
which a large bf16 matrix product runs in the same rounds.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch.nn.functional import cosine_similarity

from benchmarks.harness.models import (
    MAX_TOKENS,
    Embedder,
    forward_flops,
    our_embedder,
    product_tflops,
    random_network,
    save_weights,
)
from benchmarks.harness.proteins import Proteins, read_proteins, spread_by_length
from benchmarks.harness.stage import Case, Comparison, Contender, Device, Facts, Setting, Stage, WrongWorkError
from benchmarks.peers.transformers_embedding import (
    DOCUMENTED_BATCH,
    SEARCHED_BATCHES,
    TransformersEmbedder,
    Tuning,
    documented,
    search_tuning,
)
from benchmarks.programs.processes import MemoryMeter, peak_of

PROTEINS = {"cpu": {"ESM-2 8M": 240, "ESM-2 35M": 80}, "cuda": {"ESM-2 8M": 2_000, "ESM-2 35M": 2_000}}
"""On the CPU fewer for the larger model: the slowest peer takes half a second a protein there."""

LARGE_PROTEINS = 1_000
QUICK_PROTEINS, QUICK_RESIDUES = 6, 60
SHORT_PROTEINS = 12
SEARCH_PROTEINS = {"cpu": 32, "cuda": 512}
CHECKED_PROTEINS = 24

MEMORY_PROTEINS, QUICK_MEMORY_PROTEINS = {"cpu": 64, "cuda": 1_024}, 16
MEMORY_SIZES: dict[Device, dict[str, str]] = {
    "cpu": {"peak memory, ESM-2 8M": "esm2_t6_8M", "peak memory, ESM-2 35M": "esm2_t12_35M"},
    "cuda": {"peak memory, ESM-2 35M": "esm2_t12_35M", "peak memory, ESM-2 650M": "esm2_t33_650M"},
}
MEMORY_FLOORS: dict[Device, float] = {"cpu": 1.0, "cuda": 1 / 0.6}
"""Lower, and on a GPU at least 40 % lower."""

RELATIVE_TOLERANCE = 1e-4
LEAST_COSINE = 0.999

OURS = "esmeray, bf16"
DOCUMENTED = "transformers as documented, fp32"
DOCUMENTED_HALF = "transformers as documented, fp16"
TUNED = "transformers tuned by hand"
FAIR_ESM = "fair-esm extract"
PEAK = "bf16 matrix product"
IN_FILE_ORDER, SORTED = "transformers as documented", "transformers, bf16, sorted"

CASES = {"ESM-2 8M": "esm2_t6_8M", "ESM-2 35M": "esm2_t12_35M"}
LARGE_CASE, LARGE_SIZE = "ESM-2 650M", "esm2_t33_650M"


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    for name, size in list(CASES.items())[: 1 if setting.quick else None]:
        sequences = spread_by_length(proteins.sequences, PROTEINS[setting.device][name])
        if setting.quick:
            sequences = [sequence[:QUICK_RESIDUES] for sequence in sequences[:QUICK_PROTEINS]]
        yield _case(name, size, setting, proteins, sequences)
    if setting.device == "cuda":
        sequences = spread_by_length(proteins.sequences, LARGE_PROTEINS)
        yield _case(LARGE_CASE, LARGE_SIZE, setting, proteins, sequences)
    sizes = MEMORY_SIZES[setting.device]
    for name in list(sizes)[: 1 if setting.quick else None]:
        yield _memory_case(name, sizes[name], setting, proteins)


def _case(name: str, size: str, setting: Setting, proteins: Proteins, sequences: Sequence[str]) -> Case:
    """Proteins per second beside all peers; of the large model FLOP/s, beside what the device does at best."""
    from benchmarks.peers.fair_esm_extract import FairEsmExtract

    device = setting.device
    network = random_network(size)
    folder = save_weights(network, setting.folder / size)
    facts: Facts = {
        **proteins.facts,
        "proteins embedded": len(sequences),
        "residues embedded": sum(map(len, sequences)),
        "longest in residues": max(map(len, sequences)),
        "tokens of our batches": MAX_TOKENS[device],
    }
    embedders: dict[str, Embedder] = {
        OURS: our_embedder(folder, device, torch.bfloat16),
        DOCUMENTED_HALF if device == "cuda" else DOCUMENTED: TransformersEmbedder(folder, device, documented(device)),
    }
    contenders = []
    if name == LARGE_CASE:
        contenders.append(Contender(PEAK, partial(product_tflops, device), kind="value"))
    else:
        setting.note(f"{name} · searching the peer's best batch size")
        batch_sizes = SEARCHED_BATCHES[device][: 1 if setting.quick else None]
        tuning = search_tuning(folder, device, _spread_out(sequences, SEARCH_PROTEINS[device]), batch_sizes)
        facts["tuned by hand"] = str(tuning)
        embedders |= {TUNED: TransformersEmbedder(folder, device, tuning), FAIR_ESM: FairEsmExtract(network, device)}

    def work(embedder: Embedder, chosen: Sequence[str]) -> Callable[[], float]:
        amount = forward_flops(network, chosen) / 1e12 if name == LARGE_CASE else len(chosen)

        def embed() -> float:
            embedder(chosen)
            return amount

        return embed

    for label, embedder in reversed(embedders.items()):
        # Ours is warmed up on all sequences: batches of other shapes would be compiled in the timed rounds.
        warm = sequences if label == OURS else _spread_out(sequences, SHORT_PROTEINS)
        contenders.insert(0, Contender(label, work(embedder, sequences), short=work(embedder, warm)))
    return Case(
        name,
        "TFLOP/s" if name == LARGE_CASE else "proteins/s",
        tuple(contenders),
        rounds=5 if name == LARGE_CASE else 3,
        check=lambda: _check(setting, folder, sequences, embedders),
        facts=facts,
    )


def _memory_case(name: str, size: str, setting: Setting, proteins: Proteins) -> Case:
    """Peak memory at as many tokens a batch as the peer's batches of proteins have on average."""
    sequences = spread_by_length(proteins.sequences, MEMORY_PROTEINS[setting.device])
    if setting.quick:
        sequences = [sequence[:QUICK_RESIDUES] for sequence in sequences[:QUICK_MEMORY_PROTEINS]]
    texts = setting.folder / "sequences.txt"
    texts.write_text("\n".join(sequences), encoding="ascii")
    folder = save_weights(random_network(size), setting.folder / size)
    lengths = [len(sequence) + 2 for sequence in sequences]  # <cls> and <eos> included
    max_tokens = max(round(DOCUMENTED_BATCH * sum(lengths) / len(lengths)), max(lengths))
    arguments = {"folder": str(folder), "texts": str(texts), "device": setting.device, "max_tokens": max_tokens}

    def contender(label: str) -> Contender:
        def run() -> float:
            peak = peak_of("benchmarks.stages.embedding:embed_measured", arguments | {"contender": label})
            return peak.computing_bytes / 1e6

        return Contender(label, run, kind="value")

    contenders = tuple(contender(label) for label in (OURS, IN_FILE_ORDER, SORTED))
    facts: Facts = {**proteins.facts, "proteins embedded": len(sequences), "tokens of our batches": max_tokens}
    return Case(name, "MB", contenders, better="lower", rounds=3, facts=facts)


def embed_measured(
    meter: MemoryMeter, contender: str, folder: str, texts: str, device: Device, max_tokens: int
) -> None:
    """One contender at work, in the process whose memory is measured."""
    meter.libraries_loaded()
    embedder: Embedder
    if contender == OURS:
        embedder = our_embedder(Path(folder), device, torch.bfloat16, max_tokens)
    else:
        tuning = documented(device) if contender == IN_FILE_ORDER else Tuning("bf16 weights", sort_by_length=True)
        embedder = TransformersEmbedder(Path(folder), device, tuning)
    meter.work_begins()
    embedder(Path(texts).read_text(encoding="ascii").split("\n"))


def _spread_out(sequences: Sequence[str], number: int) -> Sequence[str]:
    """About so many of the sequences, spread over the file."""
    return sequences[:: max(1, len(sequences) // number)]


def _check(setting: Setting, folder: Path, sequences: Sequence[str], embedders: dict[str, Embedder]) -> Facts:
    """Hold our results to transformers' in fp32; return how near all embedders are to these."""
    checked = _spread_out(sequences, CHECKED_PROTEINS)
    reference_ND = TransformersEmbedder(folder, setting.device, documented("cpu"))(checked)
    exact_ND = our_embedder(folder, setting.device, torch.float32)(checked)
    difference = float((exact_ND - reference_ND).abs().max() / reference_ND.abs().max())
    if not difference <= RELATIVE_TOLERANCE:
        raise WrongWorkError(f"our fp32 embeddings differ from transformers' by {difference:.1e} relative")
    facts: Facts = {"largest relative difference to transformers, fp32": difference}
    for label, embedder in embedders.items():
        cosine = float(cosine_similarity(reference_ND.double(), embedder(checked).double()).min())
        if not cosine >= LEAST_COSINE:
            raise WrongWorkError(f"the embeddings of {label} have a cosine of {cosine:.5f} to transformers' in fp32")
        facts[f"least cosine to transformers in fp32, {label}"] = round(cosine, 6)
    return facts


def _measured_on(name: str) -> list[Device]:
    return [device for device in MEMORY_SIZES if name in MEMORY_SIZES[device]]


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
        *(
            Comparison(name, OURS, peer, {device: MEMORY_FLOORS[device] for device in _measured_on(name)})
            for name in sorted({*MEMORY_SIZES["cpu"], *MEMORY_SIZES["cuda"]})
            for peer in (IN_FILE_ORDER, SORTED)
        ),
    ),
    packages=("transformers", "esm"),
    distributions=("fair-esm", "tokenizers"),
)
