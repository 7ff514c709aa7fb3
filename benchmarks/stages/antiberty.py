"""AntiBERTy, a trained model of antibodies, from its wheel as a user copies it, held against transformers.

The folder has config.json and pytorch_model.bin as the wheel has them, and vocab.txt beside them, without a
tokenizer_config.json: transformers' own tokenizer lower-cases, and reads every residue as unknown. The reference is
transformers with the letter case put right by hand, one antibody at a time, in fp32 on the CPU. A row says by how much
vectors, masked scores and the service's probabilities differ from it, and what the model predicts of held-out human
antibodies before and after four steps of training. A difference above 2e-5 breaks the stage.
"""

import csv
import importlib.util
import math
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import torch
from transformers import BertForMaskedLM, BertTokenizer

from esmeray.benchmarks.harness.proteins import DEVELOPMENT_DATA
from esmeray.benchmarks.harness.stage import REPOSITORY, Row, Setting, Stage
from esmeray.benchmarks.programs.processes import run_program
from esmeray.benchmarks.programs.servers import service
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.models.opening import open_model
from esmeray.inference.mutations.fitted import score_mutants
from esmeray.run_folder.metrics_log import read_metrics

ANTIBODIES = DEVELOPMENT_DATA / "antibodies" / "species_chain.csv"
COMPARED = 50
TRAINED = 300
VARIABLE = 135
"""Residues of a variable domain at most."""
TOLERANCE = 2e-5
LAYERS = (0, 4, 8)
TRAINING = (
    "--config masked_lm --run.name antiberty --data.max_length 510 --data.validation_share 0.5 "
    "--model.masked_lm.mask_token_share 0.8 --model.masked_lm.random_token_share 0.1 "
    "--training.max_steps 4 --training.optimizer adamw --training.learning_rate 1e-4 --training.warmup_steps 0"
)


def _rows(setting: Setting) -> Iterator[Row]:
    copy_wheel(setting.folder / "antiberty")
    with ANTIBODIES.open(newline="") as file:
        human = [row["sequence"] for row in csv.DictReader(file) if row["label"].startswith("human")]
    # Variable domains alone, which the model was trained on.
    known = [sequence for sequence in human if len(sequence) <= VARIABLE and "X" not in sequence]
    for what, difference in _differences(setting.folder / "antiberty", known[:COMPARED]):
        verdict = f"within {TOLERANCE:g}" if difference <= TOLERANCE else f"WRONG, above {TOLERANCE:g}"
        yield {"what": what, "value": float(difference), "unit": "largest difference", "verdict": verdict}
    setting.note("training")
    losses = _losses(setting.folder, known[:TRAINED])
    for when, loss in (("before the first step", losses[0]), ("after four steps", losses[-1])):
        what = f"held-out human antibodies, {when}"
        bits = loss / math.log(2)
        yield {"what": what, "value": bits, "unit": "bits a masked residue", "verdict": f"{loss:.3f} nats"}


def copy_wheel(folder: Path) -> None:
    """Copy the model out of the installed wheel, whose own code transformers 5 does not open, and is not imported."""
    spec = importlib.util.find_spec("antiberty")
    assert spec is not None and spec.submodule_search_locations is not None
    models = Path(spec.submodule_search_locations[0]) / "trained_models"
    folder.mkdir()
    for file in ("AntiBERTy_md_smooth/config.json", "AntiBERTy_md_smooth/pytorch_model.bin", "vocab.txt"):
        shutil.copy(models / file, folder)


@torch.no_grad()
def _differences(folder: Path, antibodies: list[str]) -> Iterator[tuple[str, float]]:
    """Largest differences to transformers, by what is compared."""
    tokenizer = BertTokenizer.from_pretrained(folder, do_lower_case=False)
    network = BertForMaskedLM.from_pretrained(folder).eval()
    tokens = [tokenizer(" ".join(text), return_tensors="pt") for text in antibodies]
    outputs = [network(**own, output_hidden_states=True) for own in tokens]
    model = open_model(folder, device="cpu")
    for layer in LAYERS:
        pairs = zip(model.embed(antibodies, "residues", layer=layer), outputs, strict=True)
        theirs = [np.abs(own - output.hidden_states[layer][0, 1:-1].numpy()).max() for own, output in pairs]
        yield f"residues of layer {layer}, {len(antibodies)} antibodies", max(theirs)
    # Every position of the first, masked in turn, and there the mutant of each amino acid.
    text = antibodies[0]
    offsets = torch.arange(len(text))
    masked = tokens[0]["input_ids"].repeat(len(text), 1)
    masked[offsets, offsets + 1] = tokenizer.mask_token_id
    logits = network(input_ids=masked).logits[offsets, offsets + 1]
    logs = logits[:, tokenizer.convert_tokens_to_ids([*AMINO_ACIDS])].log_softmax(-1).numpy()
    wild = logs[offsets, [*map(AMINO_ACIDS.index, text)]]
    mutants = [f"{letter}{position}{mutant}" for position, letter in enumerate(text, 1) for mutant in AMINO_ACIDS]
    scores = score_mutants(folder, text, mutants, device="cpu").reshape(logs.shape)
    yield f"masked scores, {len(mutants):,} mutants", np.abs(scores - (logs - wild[:, None])).max()
    with service(folder.parent, {"name": "antiberty", "source": str(folder), "precision": "fp32"}) as (address, _):
        answer = httpx.post(f"{address}/v1/masked", json={"sequences": [text], "method": "masked"}, timeout=60)
    yield "probabilities of POST /v1/masked", np.abs(answer.json()["data"][0]["probabilities"] - np.exp(logs)).max()


def _losses(folder: Path, antibodies: list[str]) -> list[float]:
    """Nats a masked residue of the held-out half, before the first and after the last of four steps."""
    fasta = folder / "human.fasta"
    fasta.write_text("".join(f">{number}\n{text}\n" for number, text in enumerate(antibodies)))
    paths = {"model.backbone.source": folder / "antiberty", "data.source": fasta, "run.storage_path": folder / "runs"}
    words = [str(word) for name, value in paths.items() for word in (f"--{name}", value)]
    run_program([sys.executable, str(REPOSITORY / "train_ray.py"), *TRAINING.split(), *words])
    records = read_metrics(folder / "runs" / "antiberty" / "metrics.jsonl")
    return [record["loss"] for record in records if record["kind"] == "validation"]


STAGE = Stage(
    name="antiberty",
    summary="a trained model of antibodies from its wheel: vectors, scores and service beside transformers; training",
    cases=_rows,
    packages=("antiberty",),
    distributions=("antiberty", "transformers", "torch"),
)
