"""Compare the CPU with the GPU on embeddings of the same proteins.

Each model embeds the same proteins, spread over the lengths of the input, alternately on both devices. Each device uses
the precision and token budget that embed uses on it. A table gives proteins/s and residues/s, the speed-up with its
range over the rounds, the hours that the GPU saves per 1,000,000 proteins, and the agreement of the vectors. Without a
GPU, fp32 and bf16 on the CPU are compared. Sequences that are too long for a model are cropped.

Writes a folder: devices.json with every round, and devices.png. Close other programs before you measure.

Examples:
  esmeray profile devices --profile.models facebook/esm2_t6_8M_UR50D --data.source proteins.fasta
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from rich.table import Column, Table

from esmeray.common.command_line import result_console
from esmeray.common.errors import ConfigError
from esmeray.common.progress import status_line
from esmeray.common.timing import measure, ratio, round_ratios, timed
from esmeray.inference.embedding.section import EmbedSection
from esmeray.tools.grammar import OutputWriter, command, example_of
from esmeray.train_config.section import Overrides, PositiveInt, Precision, Section
from esmeray.training.config import load_config


class DeviceProfileSection(Section):
    """Models and number of measurements of a comparison of devices."""

    models: list[str] = Field(default=[])
    """Models: folders, hub names, model sizes or runs."""
    output: str = "profile-devices"
    """Folder to write the results to."""
    proteins: PositiveInt = 200
    """Number of distinct sequences to embed."""
    rounds: PositiveInt = 3
    """Number of measurements per device."""
    precision: Precision | None = None
    """Precision on both devices, if there is a GPU. Default: embed's default on each device."""


@command("profile devices", __doc__, made_by="profile devices")
def main(profile: DeviceProfileSection, writer: OutputWriter, overrides: Overrides) -> None:
    if not profile.models or ("data", "source") not in overrides:
        raise ConfigError(f"missing: --profile.models or --data.source; {example_of(__doc__, 'profile devices')}")
    data = load_config(None, overrides).data
    with writer.folder(Path(profile.output)) as building:
        import torch  # imported here: it takes seconds

        from esmeray.dataset.store.conversion import job_store
        from esmeray.inference.profile.report import draw_devices

        console = result_console()
        if not torch.cuda.is_available():
            console.print("no GPU found: comparing fp32 and bf16 on the CPU")
        with tempfile.TemporaryDirectory() as scratch, status_line() as show:
            store = job_store(data.source, data.ingest, Path(scratch))
            # Sorted, so that the sample is independent of the order of the file.
            texts = sorted({store.text(record) for record in range(len(store))}, key=lambda text: (len(text), text))
            models = [compare(name, texts, profile, show) for name in profile.models]
        content = {"machine": {"threads": torch.get_num_threads(), "torch": torch.__version__}, "models": models}
        (building / "devices.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        draw_devices(building / "devices.png", models)
    console.print(_table(models))
    console.print(f"written: {profile.output}", markup=False)


def compare(
    name: str, texts: Sequence[str], settings: DeviceProfileSection, show: Callable[[str], None]
) -> dict[str, Any]:
    """Embed a sample of proteins, spread over the lengths, on both devices, in alternating rounds after a warm-up."""
    import torch

    from esmeray.inference.profile.measuring import open_subject, spread

    # Each device uses embed's defaults: the comparison shows what a GPU saves, not what a precision saves.
    kinds = [("cpu", settings.precision), ("cuda", settings.precision)]
    if not torch.cuda.is_available():
        kinds = [("cpu", "fp32"), ("cpu", "bf16")]
    lengths = np.array([len(text) for text in texts])
    sample = [texts[index] for index in spread(lengths, settings.proteins).tolist()]
    subjects = {}
    for device, precision in kinds:
        subject = open_subject(name, EmbedSection(precision=precision), device, ["mean"])
        subject.run(sample[:1])  # loads kernels before the measurements
        subjects[f"{'GPU' if device == 'cuda' else 'CPU'} {subject.model.facts.precision}"] = subject
    contenders = {
        label: partial(timed, partial(subject.run, sample, subject.tokens)) for label, subject in subjects.items()
    }
    samples = measure(contenders, settings.rounds, show=lambda text: show(f"{name}, {text}"))
    # All rounds compute the same batches.
    first_batches, second_batches = (rounds[0][0] for rounds in samples.values())
    # Count computed residues, because longer sequences are cropped.
    residues = int(sum(batch.lengths.sum() for batch in first_batches))
    seconds_of = {label: [time_s for _, time_s in rounds] for label, rounds in samples.items()}
    devices = {
        label: {
            "device": subjects[label].model.facts.device_name,
            "tokens": subjects[label].tokens,
            "proteins_per_s": [len(sample) / time_s for time_s in seconds],
            "residues_per_s": [residues / time_s for time_s in seconds],
        }
        for label, seconds in seconds_of.items()
    }
    slower, faster = seconds_of.values()
    return {
        "model": name,
        "random_weights": any(subject.model.facts.random_weights for subject in subjects.values()),
        "proteins": len(sample),
        "residues": residues,
        "devices": devices,
        "speed_up": ratio(round_ratios(slower, faster))._asdict(),
        "hours_saved_per_million_proteins": 1e6 / len(sample) * (median(slower) - median(faster)) / 3600,
        "agreement": agreement(_means(first_batches), _means(second_batches)),
    }


def _means(batches: Sequence[Any]) -> NDArray[np.float32]:
    """Return (N, D) vectors in the order of the texts. The batches depend on the device's token budget."""
    order_N = np.argsort(np.concatenate([batch.indices for batch in batches]))
    return np.concatenate([batch.arrays["mean"] for batch in batches])[order_N]


def agreement(first_ND: NDArray[np.float32], second_ND: NDArray[np.float32]) -> dict[str, float]:
    """Compare each protein's two vectors by their cosine and by the norm of the difference over the first norm."""
    norms_N = np.linalg.norm(first_ND, axis=1)
    cosines_N = (first_ND * second_ND).sum(axis=1) / (norms_N * np.linalg.norm(second_ND, axis=1))
    return {
        "lowest_cosine": float(cosines_N.min()),
        "mean_cosine": float(cosines_N.mean()),
        "largest_relative_difference": float((np.linalg.norm(first_ND - second_ND, axis=1) / norms_N).max()),
    }


def _table(models: Sequence[Mapping[str, Any]]) -> Table:
    names = ("proteins/s", "residues/s", "speed-up", "saved per 1M", "lowest cosine", "difference")
    table = Table("model", "device", *(Column(name, justify="right") for name in names), box=None, padding=(0, 2, 0, 0))
    for model in models:
        of_both = [
            "{value:.2f} ({low:.2f} to {high:.2f})".format(**model["speed_up"]),
            f"{model['hours_saved_per_million_proteins']:,.3g} h",
            "{lowest_cosine:.5f}".format(**model["agreement"]),
            "{largest_relative_difference:.1e}".format(**model["agreement"]),
        ]
        for name, device in model["devices"].items():
            rates = [f"{median(device[f'{unit}_per_s']):,.1f}" for unit in ("proteins", "residues")]
            table.add_row(model["model"], name, *rates, *of_both)
            of_both = []  # shown in the first line of a model only
    return table
