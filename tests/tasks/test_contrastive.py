"""Contrastive learning: groups and levels, a loss over the whole step, and vectors for homology search."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from esmeray.common.errors import ConfigError
from esmeray.dataset.batches.preparation import PreparationSettings
from esmeray.dataset.labels.store import LabelledStore
from esmeray.dataset.targets import IGNORED_TARGET, SparseTargets
from esmeray.tasks.contrastive.experiment import GroupSource, group_ids, memberships
from esmeray.tasks.contrastive.model import ContrastiveModel, contrastive_losses
from esmeray.tasks.contrastive.section import ContrastiveSection
from esmeray.training.config import Config
from tests.runs import exported_weights, merged, tiny_config, validations
from tests.training.runs import assert_same_run, prepared, stop_after, train

RESIDUES = "ACDEFGHIKLMNPQRSTVWY"
CONTRASTIVE = {
    "batch": {"tokens": 512, "global_tokens": 2048},
    "model": {
        "task": "contrastive",
        "contrastive": {"level_weights": [1.0, 0.5]},
    },
}


def families(folder: Path, count: int = 12, members: int = 6) -> Path:
    """Write a table of families, two per superfamily; members are mutated copies of one sequence."""
    draw = random.Random(0)
    lines = ["id\tsequence\tlabel\n"]
    for family in range(count):
        ancestor = draw.choices(RESIDUES, weights=[draw.random() ** 3 for _ in RESIDUES], k=40)
        for member in range(members):
            copy = [draw.choice(RESIDUES) if draw.random() < 0.15 else residue for residue in ancestor]
            lines.append(f"f{family}m{member}\t{''.join(copy)}\ts{family // 2}.{family}\n")
    table = folder / "families.tsv"
    table.write_text("".join(lines))
    return table


def contrastive_config(folder: Path, **changes: Any) -> tuple[Config, str]:
    """Config of a run, and the path of its labelled store."""
    data = {"source": [str(families(folder.parent))], "validation_share": 0.3}
    config = tiny_config(folder, **merged(merged(CONTRASTIVE, {"data": data}), changes))
    return config, str(prepared(config))


def test_labels_are_nested_by_dots_and_a_record_may_have_several():
    names = ["a.1.1", "a.1.2", "a.2.1", "b"]
    ids_CL = group_ids(names, np.array([0, 1, 2, 3, IGNORED_TARGET]), 3)[:, 0]
    assert len(set(ids_CL[:4, 0])) == 4
    assert ids_CL[0, 1] == ids_CL[1, 1] != ids_CL[2, 1] and ids_CL[0, 2] == ids_CL[2, 2]
    assert (ids_CL[3, 1:] == IGNORED_TARGET).all() and (ids_CL[4] == IGNORED_TARGET).all()
    # Pairs as labels: the second record is in two pairs, the last in none.
    pairs = SparseTargets(np.array([0, 1, 3, 4, 4]), np.array([0, 0, 1, 1]), np.zeros((4, 1), bool), np.zeros(2, int))
    groups_RML = group_ids(["p", "q"], pairs, 1)
    assert groups_RML.shape == (4, 2, 1)
    records, groups = memberships(groups_RML[:, :, 0], np.arange(4), 2)
    assert sorted(zip(records.tolist(), groups.ids.tolist(), strict=True)) == [(0, 0), (1, 0), (1, 1), (2, 1), (3, -4)]


def test_loss_is_the_formula_s_and_a_repeated_record_counts_for_nothing():
    vectors_ND = torch.nn.functional.normalize(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), dim=1)
    # 0 and 1 are a family, 2 is in the same superfamily, 3 in another.
    groups_NML = torch.tensor([[[0, 0]], [[0, 0]], [[1, 0]], [[2, 1]]])
    section = ContrastiveSection(level_weights=[1.0, 0.5], temperature=0.5)
    losses_N = contrastive_losses(vectors_ND, groups_NML, torch.arange(4), section)
    cosines = (vectors_ND @ vectors_ND.T / 0.5).double()
    logs = [cosines[0, other] - cosines[0, 1:].logsumexp(0) for other in (1, 2)]
    assert losses_N[0].item() == pytest.approx(float(-(logs[0] + 0.5 * logs[1]) / 1.5), rel=1e-5)
    assert losses_N[3] == 0
    same = contrastive_losses(vectors_ND, groups_NML, torch.tensor([0, 0, 2, 3]), section)
    assert same[0].item() == pytest.approx(float(cosines[0, 2:].logsumexp(0) - cosines[0, 2]), rel=1e-5)


def test_gradients_of_batches_add_up_to_those_of_the_step_as_one(tmp_path: Path):
    config, path = contrastive_config(tmp_path / "run")
    model = ContrastiveModel.build(config.model, 0)
    source = _source(config, path)
    records = np.arange(24)
    whole = source.batch(0, records).batch
    model(whole).loss_sum.backward()
    wanted = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    model.zero_grad()
    batches = [source.batch(0, part).batch for part in np.array_split(records, 5)]
    with torch.no_grad():
        vectors = [model.vectors(batch) for batch in batches]
    # Two workers: each has the rows of both.
    workers: list[Any] = []
    halves = [(batches[:2], vectors[:2]), (batches[2:], vectors[2:])]
    for half in halves:
        model.related(*half, lambda own: [workers.append(own) or own], 0)
    given = [batch for rank, half in enumerate(halves) for batch in model.related(*half, lambda own: workers, rank)]
    outputs = [model(piece) for batch in given for piece in [*batch.pieces(2), batch.without_targets()]]
    torch.stack([output.loss_sum for output in outputs]).sum().backward()
    # Sums of fp32 in another order; the last bias has gradient 0, as the mean of all vectors is subtracted.
    atol = 1e-4 * max(float(gradient.abs().max()) for gradient in wanted)
    for parameter, gradient in zip((p for p in model.parameters() if p.requires_grad), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=atol)
    assert sum(output.metrics["targets"] for output in outputs) == 24
    assert sum(output.metrics["loss"] for output in outputs) == pytest.approx(float(model(whole).metrics["loss"]))


def _source(config: Config, path: str) -> GroupSource:
    labelled = LabelledStore(path)
    groups_RML = group_ids(labelled.label_space.names, labelled.targets, 2)
    return GroupSource(labelled.store, PreparationSettings(30, 3, random_crops=True, masking=None), groups_RML)


@pytest.mark.slow
def test_contrastive_training_finds_relatives_and_resumes(tmp_path: Path, process_group):
    changes = {"training": {"max_steps": 24, "evaluate_every_steps": 12, "learning_rate": 3e-3}}
    whole, path = contrastive_config(tmp_path / "whole", **changes)
    train(whole, path)
    first, *_, last = validations(whole)
    # Held-out members, with relatives and strangers in the batch: at chance level the loss would not fall.
    assert last["loss"] < 0.7 * first["loss"]
    assert exported_weights(whole)["model.safetensors/encoder.emb_layer_norm_after.bias"].abs().max() > 0.01, (
        "what all vectors have in common is off them"
    )
    stopped, _ = contrastive_config(tmp_path / "stopped", **changes)
    stop_after(stopped, path, 4)
    train(stopped, path)
    assert_same_run(stopped, whole)


def test_a_merged_export_gives_the_vectors_without_their_common_mean(tmp_path: Path):
    config, path = contrastive_config(tmp_path / "run", model={"backbone": {"lora": {"rank": 2}}})
    model = ContrastiveModel.build(config.model, 0)
    batch = _source(config, path).batch(0, np.arange(8)).batch
    for _ in range(3):
        model(batch)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # initial zeros would hide a lost adapter
            torch.nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        wanted_ND = model.vectors(batch) - model.centre
        assert model.centre.abs().max() > 0
        network = model.network().eval()
        for number, row_D in enumerate(wanted_ND):
            start, end = batch.cu_seqlens[number : number + 2].tolist()
            features_TD = network(batch.tokens[None, start:end]).last_hidden_state[0]
            # In fp32, with transformers' own forward pass.
            torch.testing.assert_close(features_TD[1:-1].mean(0), row_D, rtol=1e-3, atol=1e-4)


def test_groups_that_can_t_be_learnt_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="kind regression"):
        contrastive_config(tmp_path / "run", data={"labels": {"kind": "regression"}})
