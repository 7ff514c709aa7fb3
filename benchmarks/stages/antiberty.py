"""AntiBERTy, a trained model of antibodies, from its wheel as a user copies it, compared with transformers.

The folder has config.json and pytorch_model.bin as the wheel has them, and vocab.txt next to them, without a
tokenizer_config.json: transformers' own tokenizer lower-cases, and reads every residue as unknown. The reference is
transformers with the letter case put right by hand, one antibody at a time, in fp32 on the CPU. A row says by how much
vectors, masked scores and the service's probabilities differ from it, and what the model predicts of held-out human
antibodies before and after four steps of training. A difference above 2e-5 breaks the stage.
"""

import math
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import httpx
import numpy as np
import pandas as pd
import torch
from transformers import BertForMaskedLM, BertTokenizer

import esmeray
from benchmarks.harness.proteins import DEVELOPMENT_DATA, write_fasta
from benchmarks.harness.stage import REPOSITORY, Row, Setting, Stage
from benchmarks.programs.processes import run_program
from benchmarks.programs.servers import service
from esmeray.dataset.fasta.alphabet import AMINO_ACIDS

TOLERANCE = 2e-5
# Variable domains alone, which the model was trained on.
KNOWN = "label.str.startswith('human') and sequence.str.fullmatch('[^X]{1,135}')"
TRAINING = (
    "--config masked_lm --run.name run --data.max_length 510 --data.validation_share 0.5 "
    "--model.masked_lm.mask_token_share 0.8 --model.masked_lm.random_token_share 0.1 "
    "--training.max_steps 4 --training.optimizer adamw --training.learning_rate 1e-4 --training.warmup_steps 0"
)


def _rows(setting: Setting) -> Iterator[Row]:
    folder = setting.folder / "antiberty"
    # Copied: the wheel's own code does not open under transformers 5, and is not imported.
    models = Path(str(distribution("antiberty").locate_file("antiberty/trained_models")))
    shutil.copytree(models / "AntiBERTy_md_smooth", folder)
    shutil.copy(models / "vocab.txt", folder)
    antibodies = pd.read_csv(DEVELOPMENT_DATA / "antibodies" / "species_chain.csv").query(KNOWN)["sequence"].tolist()
    for what, difference in _differences(folder, antibodies[:50]):
        verdict = f"within {TOLERANCE:g}" if difference <= TOLERANCE else f"WRONG, above {TOLERANCE:g}"
        yield {"what": what, "value": float(difference), "unit": "largest difference", "verdict": verdict}
    setting.note("training")
    write_fasta(setting.folder / "human.fasta", antibodies, len(antibodies))
    paths = {
        "model.backbone.source": folder,
        "data.source": folder.with_name("human.fasta"),
        "run.storage_path": folder,
    }
    options = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
    run_program([sys.executable, str(REPOSITORY / "train_ray.py"), *TRAINING.split(), *options])
    records = pd.read_json(folder / "run" / "metrics.jsonl", lines=True)
    # Nats a masked residue of the held-out half.
    losses = records.query("kind == 'validation'")["loss"].iloc[[0, -1]].tolist()
    for when, loss in zip(("before the first step", "after four steps"), losses, strict=True):
        bits = {"value": loss / math.log(2), "unit": "bits a masked residue", "verdict": f"{loss:.3f} nats"}
        yield {"what": f"held-out human antibodies, {when}", **bits}


@torch.no_grad()
def _differences(folder: Path, antibodies: list[str]) -> Iterator[tuple[str, float]]:
    """Largest differences to transformers, by what is compared."""
    tokenizer = BertTokenizer.from_pretrained(folder, do_lower_case=False)
    network = BertForMaskedLM.from_pretrained(folder).eval()
    tokens = [tokenizer(" ".join(text), return_tensors="pt") for text in antibodies]
    outputs = [network(**own, output_hidden_states=True) for own in tokens]
    for layer in (0, 4, 8):
        ours = esmeray.open_model(folder, device="cpu").embed(antibodies, "residues", layer=layer)
        pairs = zip(ours, (output.hidden_states[layer][0, 1:-1].numpy() for output in outputs), strict=True)
        yield f"residues of layer {layer}, {len(antibodies)} antibodies", max(np.abs(a - b).max() for a, b in pairs)
    # Every position of the first, masked in turn, and there the mutant of each amino acid.
    text = antibodies[0]
    offsets = torch.arange(len(text))
    masked = tokens[0]["input_ids"].repeat(len(text), 1)
    masked[offsets, offsets + 1] = tokenizer.mask_token_id
    logits = network(input_ids=masked).logits[offsets, offsets + 1]
    logs = logits[:, tokenizer.convert_tokens_to_ids([*AMINO_ACIDS])].log_softmax(-1).numpy()
    mutants = [f"{letter}{position}{mutant}" for position, letter in enumerate(text, 1) for mutant in AMINO_ACIDS]
    scores = esmeray.score_mutants(folder, text, mutants, device="cpu").reshape(logs.shape)
    wild = logs[offsets, [*map(AMINO_ACIDS.index, text)], None]
    yield f"masked scores, {len(mutants):,} mutants", np.abs(scores - (logs - wild)).max()
    with service(folder.parent, {"name": "antiberty", "source": str(folder), "precision": "fp32"}) as (address, _):
        answer = httpx.post(f"{address}/v1/masked", json={"sequences": [text], "method": "masked"}, timeout=60)
    yield "probabilities of POST /v1/masked", np.abs(answer.json()["data"][0]["probabilities"] - np.exp(logs)).max()


STAGE = Stage(
    name="antiberty",
    summary="a trained antibody model from its wheel: vectors, scores and service compared with transformers; training",
    cases=_rows,
    packages=("antiberty",),
    distributions=("antiberty", "transformers", "torch"),
)
