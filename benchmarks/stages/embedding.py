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

The share of a GPU's peak, also of larger models, is what ``python -m benchmarks gpu`` measures.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from esmeray.benchmarks.harness.models import (
    MAX_TOKENS,
    Embedder,
    least_cosines,
    our_embedder,
    random_network,
    save_weights,
)
from esmeray.benchmarks.harness.proteins import Proteins, every_nth, few_short, read_proteins, spread_by_length
from esmeray.benchmarks.harness.stage import Case, Comparison, Contender, Device, Facts, Setting, Stage, WrongWorkError
from esmeray.benchmarks.peers.transformers_embedding import (
    DOCUMENTED_BATCH,
    TransformersEmbedder,
    Tuning,
    documented,
    search_tuning,
)
from esmeray.benchmarks.programs.processes import MemoryMeter, Peak, call

SMALL, MEDIUM = "ESM-2 8M", "ESM-2 35M"
SIZES = {SMALL: "esm2_t6_8M", MEDIUM: "esm2_t12_35M"}
PROTEINS = {"cpu": {SMALL: 240, MEDIUM: 80}, "cuda": {SMALL: 2_000, MEDIUM: 2_000}}
"""On the CPU fewer for the larger model: the slowest peer takes half a second a protein there."""
SHORT_PROTEINS, CHECKED_PROTEINS = 12, 24
SEARCH_PROTEINS = {"cpu": 32, "cuda": 512}

MEMORY_PROTEINS = {"cpu": 64, "cuda": 1_024}
MEMORY_FLOORS: dict[Device, float] = {"cpu": 1.0, "cuda": 1 / 0.6}
"""Lower, and on a GPU at least 40 % lower."""

RELATIVE_TOLERANCE = 1e-4

OURS = "esmeray, bf16"
DOCUMENTED = "transformers as documented, fp32"
DOCUMENTED_HALF = "transformers as documented, fp16"
TUNED = "transformers tuned by hand"
FAIR_ESM = "fair-esm extract"
IN_FILE_ORDER, SORTED = "transformers as documented", "transformers, bf16, sorted"


def _cases(setting: Setting) -> Iterator[Case]:
    proteins = read_proteins(setting.fasta)
    step = 2 if setting.quick else 1  # a smoke run leaves 35M out
    for name, number in list(PROTEINS[setting.device].items())[::step]:
        yield _case(name, setting, proteins, few_short(setting, spread_by_length(proteins.sequences, number)))
    # After the rates: a contender of these runs in a process of its own, beside nothing that is measured by time.
    for name in list(SIZES)[::step]:
        yield _memory_case(name, setting, proteins)


def _case(name: str, setting: Setting, proteins: Proteins, sequences: Sequence[str]) -> Case:
    """Proteins per second beside all peers."""
    from esmeray.benchmarks.peers.fair_esm_extract import FairEsmExtract

    device = setting.device
    network = random_network(SIZES[name])
    folder = save_weights(network, setting.folder / SIZES[name])
    facts: Facts = {
        **proteins.facts,
        "proteins embedded": len(sequences),
        "residues embedded": sum(map(len, sequences)),
        "longest in residues": max(map(len, sequences)),
        "tokens of our batches": MAX_TOKENS[device],
    }
    setting.note(f"{name} · searching the peer's best batch size")
    tuning = search_tuning(folder, setting, every_nth(sequences, SEARCH_PROTEINS[device]))
    facts["tuned by hand"] = str(tuning)
    embedders: dict[str, Embedder] = {
        OURS: our_embedder(folder, device, "bf16"),
        DOCUMENTED_HALF if device == "cuda" else DOCUMENTED: TransformersEmbedder(folder, device, documented(device)),
        TUNED: TransformersEmbedder(folder, device, tuning),
        FAIR_ESM: FairEsmExtract(network, device),
    }
    contenders = []
    for label, embedder in embedders.items():
        # Ours is warmed up on all sequences: batches of other shapes would be compiled in the timed rounds.
        warm = sequences if label == OURS else every_nth(sequences, SHORT_PROTEINS)
        timed = partial(_embedded, embedder)
        contenders.append(Contender(label, partial(timed, sequences), short=partial(timed, warm)))
    check = partial(_check, setting, folder, sequences, embedders)
    # Fewer rounds than usual: the slowest peer takes minutes for each.
    return Case(name, "proteins/s", tuple(contenders), rounds=3, check=check, facts=facts)


def _embedded(embedder: Embedder, sequences: Sequence[str]) -> float:
    return len(embedder(sequences))


def _memory_case(name: str, setting: Setting, proteins: Proteins) -> Case:
    """Peak memory at as many tokens a batch as the peer's batches of proteins have on average."""
    sequences = few_short(setting, spread_by_length(proteins.sequences, MEMORY_PROTEINS[setting.device]))
    folder = save_weights(random_network(SIZES[name]), setting.folder / SIZES[name])
    lengths = [len(sequence) + 2 for sequence in sequences]  # <cls> and <eos> included
    max_tokens = max(round(DOCUMENTED_BATCH * sum(lengths) / len(lengths)), max(lengths))
    shared = {"folder": str(folder), "sequences": sequences, "device": setting.device, "max_tokens": max_tokens}

    def peak(label: str) -> float:
        return Peak(*call(f"{__name__}:embed_measured", contender=label, **shared)).computing_bytes / 1e6

    contenders = tuple(Contender(label, partial(peak, label), "value") for label in (OURS, IN_FILE_ORDER, SORTED))
    facts: Facts = {**proteins.facts, "proteins embedded": len(sequences), "tokens of our batches": max_tokens}
    return Case(f"peak memory, {name}", "MB", contenders, better="lower", rounds=3, facts=facts)


def embed_measured(contender: str, folder: str, sequences: list[str], device: Device, max_tokens: int) -> Peak:
    """One contender at work, in the process whose memory is measured."""
    meter = MemoryMeter()
    embedder: Embedder
    if contender == OURS:
        embedder = our_embedder(Path(folder), device, "bf16", max_tokens)
    else:
        tuning = documented(device) if contender == IN_FILE_ORDER else Tuning("bf16 weights", sort_by_length=True)
        embedder = TransformersEmbedder(Path(folder), device, tuning)
    meter.work_begins()  # weights stay; what loading them took beyond that is no peak of embedding
    embedder(sequences)
    return meter.peak()


def _check(setting: Setting, folder: Path, sequences: Sequence[str], embedders: dict[str, Embedder]) -> Facts:
    """Hold our results to transformers' in fp32; return how near all embedders are to these."""
    checked = every_nth(sequences, CHECKED_PROTEINS)
    reference_ND = TransformersEmbedder(folder, setting.device, documented("cpu"))(checked)
    exact_ND = our_embedder(folder, setting.device, "fp32")(checked)
    # fp32 on both sides, the one precision in which two implementations can agree to four digits.
    difference = float((exact_ND - reference_ND).abs().max() / reference_ND.abs().max())
    if not difference <= RELATIVE_TOLERANCE:
        raise WrongWorkError(f"our fp32 embeddings differ from transformers' by {difference:.1e} relative")
    vectors = {label: embedder(checked) for label, embedder in embedders.items()}
    return {
        "largest relative difference to transformers, fp32": difference,
        **least_cosines("transformers in fp32", reference_ND, vectors),
    }


STAGE = Stage(
    name="embedding",
    summary="proteins to mean embeddings, beside transformers as documented and tuned, and fair-esm's extract",
    cases=_cases,
    comparisons=(
        *(
            comparison
            for name, least_tuned in ((SMALL, 1.3), (MEDIUM, 1.5))
            for comparison in (
                Comparison(name, OURS, DOCUMENTED, {"cpu": 8.0}),
                Comparison(name, OURS, DOCUMENTED_HALF),
                Comparison(name, OURS, TUNED, {"cpu": least_tuned}),
                Comparison(name, OURS, FAIR_ESM, {"cpu": 8.0}),
            )
        ),
        *(
            Comparison(f"peak memory, {name}", OURS, peer, MEMORY_FLOORS)
            for name in SIZES
            for peer in (IN_FILE_ORDER, SORTED)
        ),
    ),
    packages=("transformers", "esm"),
    distributions=("fair-esm", "tokenizers"),
)
