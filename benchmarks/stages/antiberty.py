"""AntiBERTy, a trained model of antibodies, from its wheel as a user copies it, held against transformers.

The folder has config.json and pytorch_model.bin as the wheel has them, and vocab.txt beside them, without a
tokenizer_config.json: transformers' own tokenizer lower-cases, and reads every residue as unknown. The reference is
transformers with the letter case put right by hand, one antibody at a time, in fp32 on the CPU. A row says by how much
vectors, masked scores and the service's probabilities differ from it, and what the model predicts of held-out human
antibodies before and after four steps of training. A difference above 2e-5 breaks the stage.
"""

import csv
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import torch
from transformers import BertForMaskedLM, BertTokenizer

from esmeray.benchmarks.harness.proteins import DEVELOPMENT_DATA, read_proteins
from esmeray.benchmarks.harness.stage import REPOSITORY, Row, Setting, Stage
from esmeray.benchmarks.programs.processes import run_program
from esmeray.benchmarks.programs.servers import service
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS
from esmeray.inference.models.opening import open_model
from esmeray.inference.mutations.fitted import score_mutants
from esmeray.run_folder.metrics_log import read_metrics

ANTIBODIES = DEVELOPMENT_DATA / "antibodies" / "species_chain.csv"
COMPARED, TRAINED, VARIABLE = 50, 300, 135
TOLERANCE = 2e-5
LAYERS = (0, 4, 8)


def _rows(setting: Setting) -> Iterator[Row]:
    folder = setting.folder / "antiberty"
    copy_wheel(folder)
    if setting.fasta is not None:
        antibodies = read_proteins(setting.fasta).sequences
    else:
        with ANTIBODIES.open(newline="") as file:
            human = [row["sequence"] for row in csv.DictReader(file) if row["label"].startswith("human")]
        # Variable domains alone, which the model was trained on.
        antibodies = [sequence for sequence in human if len(sequence) <= VARIABLE]
    known = [sequence for sequence in antibodies if "X" not in sequence]
    yield from _parity(folder, known[:COMPARED])
    setting.note("training")
    yield from _training(setting.folder, known[:TRAINED])


def copy_wheel(folder: Path) -> None:
    """Copy the model out of the installed wheel, whose own code transformers 5 does not open, and is not imported."""
    spec = importlib.util.find_spec("antiberty")
    assert spec is not None and spec.submodule_search_locations is not None
    models = Path(spec.submodule_search_locations[0]) / "trained_models"
    folder.mkdir()
    for file in ("AntiBERTy_md_smooth/config.json", "AntiBERTy_md_smooth/pytorch_model.bin", "vocab.txt"):
        shutil.copy(models / file, folder)


@torch.no_grad()
def _parity(folder: Path, antibodies: list[str]) -> Iterator[Row]:
    tokenizer = BertTokenizer.from_pretrained(folder, do_lower_case=False)
    network = BertForMaskedLM.from_pretrained(folder).eval()
    columns = tokenizer.convert_tokens_to_ids([*AMINO_ACIDS])
    tokens = [tokenizer(" ".join(text), return_tensors="pt") for text in antibodies]
    outputs = [network(**own, output_hidden_states=True) for own in tokens]
    model = open_model(folder, device="cpu")
    for layer in LAYERS:
        pairs = zip(model.embed(antibodies, "residues", layer=layer), outputs, strict=True)
        theirs = [np.abs(own - output.hidden_states[layer][0, 1:-1].numpy()).max() for own, output in pairs]
        yield _row(f"residues of layer {layer}, {len(antibodies)} antibodies", max(theirs))
    # Every position of the first, masked in turn, and there the mutant of each amino acid.
    text = antibodies[0]
    masked = tokens[0]["input_ids"].repeat(len(text), 1)
    positions = torch.arange(len(text))
    masked[positions, positions + 1] = tokenizer.mask_token_id
    logits = network(input_ids=masked).logits[positions, positions + 1][:, columns]
    logs = logits.log_softmax(-1).numpy()
    wild = logs[positions, [AMINO_ACIDS.index(letter) for letter in text]]
    mutants = [f"{letter}{n}{mutant}" for n, letter in enumerate(text, 1) for mutant in AMINO_ACIDS if mutant != letter]
    ours = score_mutants(folder, text, mutants, device="cpu")
    is_mutant = np.array([[mutant != letter for mutant in AMINO_ACIDS] for letter in text])
    yield _row(f"masked scores, {len(mutants):,} mutants", np.abs(ours - (logs - wild[:, None])[is_mutant]).max())
    with service(folder.parent, {"name": "antiberty", "source": str(folder), "precision": "fp32"}) as (address, _):
        body = {"sequences": [text], "method": "masked"}
        answer = httpx.post(f"{address}/v1/masked", json=body, timeout=60).json()
    served = np.array(answer["data"][0]["probabilities"])
    yield _row("probabilities of POST /v1/masked", np.abs(served - np.exp(logs)).max())


def _row(what: str, difference: float) -> Row:
    verdict = f"within {TOLERANCE:g}" if difference <= TOLERANCE else f"WRONG, above {TOLERANCE:g}"
    return {"what": what, "value": float(difference), "unit": "largest difference", "verdict": verdict}


def _training(folder: Path, antibodies: list[str]) -> Iterator[Row]:
    fasta = folder / "human.fasta"
    fasta.write_text("".join(f">{number}\n{text}\n" for number, text in enumerate(antibodies)))
    settings = {
        "config": "masked_lm",
        "run.name": "antiberty",
        "run.storage_path": folder / "runs",
        "model.backbone.source": folder / "antiberty",
        "data.source": fasta,
        "data.max_length": 510,
        "data.validation_share": 0.5,
        "model.masked_lm.mask_token_share": 0.8,
        "model.masked_lm.random_token_share": 0.1,
        "training.max_steps": 4,
        "training.optimizer": "adamw",
        "training.learning_rate": 1e-4,
        "training.warmup_steps": 0,
    }
    words = [str(word) for name, value in settings.items() for word in (f"--{name}", value)]
    run_program([sys.executable, str(REPOSITORY / "train_ray.py"), *words])
    records = read_metrics(folder / "runs" / "antiberty" / "metrics.jsonl")
    losses = [record["loss"] for record in records if record["kind"] == "validation"]
    for when, loss in zip(("before the first step", "after four steps"), (losses[0], losses[-1]), strict=True):
        value = {"value": loss / np.log(2), "unit": "bits a masked residue", "verdict": f"{loss:.3f} nats"}
        yield {"what": f"held-out human antibodies, {when}", **value}


STAGE = Stage(
    name="antiberty",
    summary="a trained model of antibodies from its wheel: vectors, scores and service beside transformers; training",
    cases=_rows,
    packages=("antiberty",),
    distributions=("antiberty", "transformers", "torch"),
)
