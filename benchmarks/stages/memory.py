"""Peak memory of the embedding forward at equal tokens a batch, beside transformers as documented and tuned by hand.

Each contender embeds the same real proteins in a process of its own. The peers take batches of 16 proteins, in the
order of the file or sorted by length; ours takes as many tokens a batch as those have on average, padding left out.
What counts is the peak while embedding, weights included, less what the libraries take: on the CPU resident memory, on
CUDA what torch has allocated. fair-esm is left out, since its batches can't be set to a number of proteins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.harness.proteins import Proteins, read_proteins, spread_by_length
from benchmarks.harness.stage import Case, Comparison, Contender, Device, Facts, Setting, Stage

if TYPE_CHECKING:
    from benchmarks.harness.models import Embedder
    from benchmarks.programs.processes import MemoryMeter

PROTEINS = {"cpu": 64, "cuda": 1_024}
QUICK_PROTEINS, QUICK_RESIDUES = 16, 60
PEER_BATCH = 16

OURS = "esmeray, bf16"
DOCUMENTED = "transformers as documented"
TUNED = "transformers, bf16, sorted"

CASES: dict[Device, dict[str, str]] = {
    "cpu": {"embedding, ESM-2 8M": "esm2_t6_8M", "embedding, ESM-2 35M": "esm2_t12_35M"},
    "cuda": {"embedding, ESM-2 35M": "esm2_t12_35M", "embedding, ESM-2 650M": "esm2_t33_650M"},
}

FLOORS: dict[Device, float] = {"cpu": 1.0, "cuda": 1 / 0.6}
"""Lower, and on a GPU at least 40 % lower."""


def _cases(setting: Setting) -> Iterator[Case]:
    from benchmarks.harness.models import random_network, save_weights

    proteins = read_proteins(setting.fasta)
    sequences = spread_by_length(proteins.sequences, PROTEINS[setting.device])
    if setting.quick:
        sequences = [sequence[:QUICK_RESIDUES] for sequence in sequences[:QUICK_PROTEINS]]
    list_file = setting.folder / "sequences.txt"
    list_file.write_text("\n".join(sequences), encoding="ascii")
    sizes = CASES[setting.device]
    for name in list(sizes)[:1] if setting.quick else sizes:
        setting.note(f"{name} · making weights")
        folder = save_weights(random_network(sizes[name]), setting.folder / sizes[name])
        yield _case(name, folder, list_file, setting, proteins, sequences)


def _case(
    name: str, folder: Path, list_file: Path, setting: Setting, proteins: Proteins, sequences: Sequence[str]
) -> Case:
    from benchmarks.programs.processes import peak_of

    lengths = [len(sequence) + 2 for sequence in sequences]  # <cls> and <eos> included
    max_tokens = max(round(PEER_BATCH * sum(lengths) / len(lengths)), max(lengths))

    def contender(label: str) -> Contender:
        paths = {"folder": str(folder), "sequences": str(list_file)}
        arguments = {"contender": label, "device": setting.device, "max_tokens": max_tokens, **paths}

        def run() -> float:
            return peak_of("benchmarks.stages.memory:embed_measured", arguments).computing_bytes / 1e6

        return Contender(label, run, kind="value")

    contenders = tuple(contender(label) for label in (OURS, DOCUMENTED, TUNED))
    facts: Facts = {**proteins.facts, "proteins embedded": len(sequences), "tokens of our batches": max_tokens}
    return Case(name, "MB", contenders, better="lower", rounds=3, facts=facts)


def embed_measured(
    meter: MemoryMeter, contender: str, folder: str, sequences: str, device: Device, max_tokens: int
) -> None:
    """One contender at work, in its process."""
    import torch

    from benchmarks.harness.models import our_embedder
    from benchmarks.peers.transformers_embedding import TransformersEmbedder, Tuning, documented

    meter.libraries_loaded()
    embedder: Embedder
    if contender == OURS:
        embedder = our_embedder(Path(folder), device, torch.bfloat16, max_tokens)
    elif contender == DOCUMENTED:
        embedder = TransformersEmbedder(Path(folder), device, documented(device))
    else:
        tuning = Tuning("bf16 weights", PEER_BATCH, sort_by_length=True)
        embedder = TransformersEmbedder(Path(folder), device, tuning)
    meter.work_begins()
    embedder(Path(sequences).read_text(encoding="ascii").split("\n"))


STAGE = Stage(
    name="memory",
    summary="peak memory of embedding at equal tokens a batch, beside transformers",
    cases=_cases,
    comparisons=tuple(
        Comparison(name, OURS, peer, {device: FLOORS[device] for device in FLOORS if name in CASES[device]})
        for name in sorted({*CASES["cpu"], *CASES["cuda"]})
        for peer in (DOCUMENTED, TUNED)
    ),
    packages=("transformers",),
)
