"""Sequences as text to token ids, beside transformers' EsmTokenizer over the same strings.

Ours packs them (ids, boundaries and positions as tensors, what a model takes); the peer returns lists of ids, without
padding and tensors, which is the least that it can be asked for. One thread. The ids are compared before.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.harness.proteins import MAX_RESIDUES, read_proteins, spread_by_length
from benchmarks.harness.protocol import single_thread
from benchmarks.harness.stage import Case, Comparison, Contender, Facts, Setting, Stage, WrongWorkError

SEQUENCES, QUICK_SEQUENCES = 2_000, 200
PASSES = 50
"""Ours goes over the sequences so often in one measurement: once takes milliseconds."""

OURS = "esmeray pack_sequences"
PEER = "transformers EsmTokenizer"


def _cases(setting: Setting) -> Iterator[Case]:
    from benchmarks.peers.tokenizers import esm_tokenizer
    from dataset.tokens.esm import pack_sequences

    proteins = read_proteins(setting.fasta)
    sequences = spread_by_length(proteins.sequences, QUICK_SEQUENCES if setting.quick else SEQUENCES)
    tokenizer = esm_tokenizer(setting.folder)

    def ours() -> float:
        for _ in range(PASSES):
            pack_sequences(sequences)
        return PASSES * len(sequences)

    def peer() -> float:
        return len(tokenizer(sequences)["input_ids"])

    def check() -> Facts:
        batch = pack_sequences(sequences)
        theirs = [token for ids in tokenizer(sequences)["input_ids"] for token in ids]
        if batch.tokens.tolist() != theirs:
            raise WrongWorkError("the token ids differ from EsmTokenizer's")
        return {"token ids checked to be equal": len(theirs)}

    with single_thread():
        yield Case(
            name="text to token ids",
            unit="sequences/s",
            contenders=(Contender(OURS, ours), Contender(PEER, peer)),
            check=check,
            facts={**proteins.facts, "sequences": len(sequences), "cropped to residues": MAX_RESIDUES},
        )


STAGE = Stage(
    name="tokenizer",
    summary="text to packed token ids, beside EsmTokenizer",
    cases=_cases,
    comparisons=(Comparison("text to token ids", OURS, PEER, {"cpu": 300.0, "cuda": 300.0}),),
    packages=("transformers",),
    distributions=("tokenizers",),
)
