"""Certificates of every kind of task and of the presets, and replacements for missing data."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tools.verify.test_faults import wrap
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardtrain import cli, config
from shardtrain.config import presets
from shardtrain.distributed import distillation_runner
from shardtrain.lora.linear import LoraLinear
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks import simpo
from shardtrain.tasks.orpo import ORPO
from shardtrain.tasks.reward_model import RewardModel
from shardtrain.tools import verify
from shardtrain.tools.verify.certificate.small_run import ROWS
from shardtrain.tools.verify.certificate.substitutes import with_substitutes
from shardtrain.tools.verify.verify_request import VerifyOptions
from shardtrain.train.step_sums import StepSums

TASKS = {
    "preference": (),
    "kto": ("--task.label_field", "is_good"),
    "orpo": (),
    "simpo": (),
    "reward_model": (),
    "classification": ("--task.num_labels", "4"),
    "language_model": ("--lora.enable", "true", "--lora.random_base", "true", "--lora.rank", "2"),
}


@pytest.mark.parametrize("task", TASKS)
def test_numbers_of_a_task_do_not_depend_on_the_mesh(check, task):
    options = ("--task.name", task, *TASKS[task])
    for dimension in ("task", "accumulation", "resume"):
        result = check(dimension, *options)
        assert result.verdict == "holds", result
    assert check("task", *options).comparisons[0].verdict == "same"


@pytest.mark.parametrize("task", [*sorted(TASKS.keys() - {"language_model"})])
def test_a_wrong_divisor_of_a_task_is_seen(check, monkeypatch, task):
    monkeypatch.setattr(StepSums, "all_reduce", lambda self, _: self)
    result = check("task", "--task.name", task, *TASKS[task], meshes=("dp_shard=2",))
    assert result.verdict == "differs", result
    assert "in step 1" in result.comparisons[0].first, result


def mean_over_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the mean over the pairs of a micro-batch, as a loss function with reduction="mean" does."""

    def loss_sum(original, self, outputs, batch, weight):
        return original(self, outputs, batch, weight) * ROWS / len(outputs)

    wrap(monkeypatch, ORPO, "loss_sum", loss_sum)


def padded_length_as_divisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the loss of a text by the padded length of the micro-batch instead of its own length."""

    def forward(original, self, model, batch):
        outputs_B3 = original(self, model, batch)
        chosen_BT = batch["targets_B2T"][:, 0]
        columns_T = torch.arange(1, chosen_BT.size(1) + 1)
        lengths_B = ((chosen_BT != IGNORE) * columns_T).amax(-1)
        text_loss_B = outputs_B3[:, 2] * lengths_B / chosen_BT.size(1)
        return torch.cat((outputs_B3[:, :2], text_loss_B[:, None]), dim=1)

    wrap(monkeypatch, ORPO, "forward", forward)


def mean_length_as_divisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide each answer by the mean length of the micro-batch's answers."""

    def mean_length(original, batch):
        return original(batch).double().mean()

    wrap(monkeypatch, simpo, "answer_lengths", mean_length)


def score_of_the_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score a text at the last column of the micro-batch, which may be padding."""

    def forward(original, self, model, batch):
        last_B2 = torch.full_like(batch["lengths_B2"], batch["tokens_B2T"].size(-1))
        tensors = {**batch.tensors, "lengths_B2": last_B2}
        return original(self, model, dataclasses.replace(batch, tensors=tensors))

    wrap(monkeypatch, RewardModel, "forward", forward)


FAULTS_OF_MICRO_BATCHES = {
    "mean over pairs": ("orpo", mean_over_pairs),
    "padded length as divisor": ("orpo", padded_length_as_divisor),
    "mean length as divisor": ("simpo", mean_length_as_divisor),
    "score of the padding": ("reward_model", score_of_the_padding),
}
"""Task, and function that makes the loss of a row depend on the other rows of its micro-batch."""


@pytest.mark.parametrize("name", FAULTS_OF_MICRO_BATCHES)
def test_a_loss_that_depends_on_the_micro_batch_is_seen(check, monkeypatch, name):
    task, plant = FAULTS_OF_MICRO_BATCHES[name]
    plant(monkeypatch)
    result = check("accumulation", "--task.name", task)
    assert result.verdict == "differs", result
    assert "in step 1" in result.comparisons[0].first, result


LORA = ("--task.name", "language_model", *TASKS["language_model"])


def test_gradients_of_adapters_that_are_not_reduced_over_tp_are_seen(check, monkeypatch):
    def to_local(original, self, *, grad_placements=None):
        if self.is_leaf and self.requires_grad and grad_placements == (Partial(),):
            grad_placements = (Replicate(),)
        return original(self, grad_placements=grad_placements)

    wrap(monkeypatch, DTensor, "to_local", to_local)
    result = check("task", *LORA, meshes=("tp=2",))

    assert result.verdict == "differs", result
    assert re.match(
        r"the first difference is gradient of \S+\.lora_[ab] in step 1", result.comparisons[0].first
    )


def test_gradients_of_adapters_on_one_data_rank_only_are_seen(check, monkeypatch):
    """The other rank computes the same output, but its share never reaches the optimizer."""

    def added(original, self, x, a_RI, b_OR):
        if dist.is_initialized() and dist.get_rank() > 0:
            a_RI = a_RI.detach() + 0 * a_RI
            b_OR = b_OR.detach() + 0 * b_OR
        return original(self, x, a_RI, b_OR)

    wrap(monkeypatch, LoraLinear, "_added", added)
    result = check("task", *LORA, meshes=("dp_shard=2",))

    assert result.verdict == "differs", result
    assert re.match(
        r"the first difference is gradient of \S+\.lora_[ab] in step 1", result.comparisons[0].first
    )


@pytest.fixture(scope="module")
def distillation(tmp_path_factory):
    """Options of a distillation from a teacher of another family."""
    pytest.importorskip("transformers")
    from hub_folders import build, save

    folder = save(build("qwen3", vocab_size=512), tmp_path_factory.mktemp("teacher") / "qwen3")
    return (
        "--task.name",
        "distillation",
        "--task.teacher_path",
        str(folder),
        "--task.temperature",
        "2.0",
    )


def test_numbers_of_a_distillation_do_not_depend_on_the_mesh(check, distillation):
    for dimension in ("task", "accumulation", "resume"):
        result = check(dimension, *distillation)
        assert result.verdict == "holds", result
    assert "its own loss" in check("mesh", *distillation).reason


def test_a_distillation_divided_by_the_targets_of_each_micro_batch_is_seen(
    check, monkeypatch, distillation
):
    def mean(original, student, teacher, targets, mix, weight, vocabulary):
        loss, sums = original(student, teacher, targets, mix, weight, vocabulary)
        return loss / (targets != IGNORE).sum(), sums

    wrap(monkeypatch, distillation_runner, "distillation_sum", mean)
    result = check("accumulation", *distillation)

    assert result.verdict == "differs", result
    assert "in step 1" in result.comparisons[0].first, result


def test_a_teacher_that_attends_to_other_documents_is_seen(check, monkeypatch, distillation):
    packed = (*distillation, "--data.packing", "first_fit")
    assert check("packing", *packed).verdict == "holds"

    def loss(original, self, batch, weight):
        teacher = self.teacher
        handle = teacher.register_forward_pre_hook(
            lambda _, inputs, __: (inputs, {}), with_kwargs=True
        )
        try:
            return original(self, batch, weight)
        finally:
            handle.remove()

    wrap(monkeypatch, distillation_runner.DistillationRunner, "_loss", loss)
    result = check("packing", *packed)

    assert result.verdict == "differs", result
    assert "in step 1" in result.comparisons[0].first, result


def test_missing_data_and_tokenizers_are_replaced_and_named(tmp_path):
    loaded, notes = with_substitutes(config.load("llama3_8b", []), tmp_path)
    assert loaded.config.model.hf_assets_path == "bytes"
    assert loaded.config.training.dataset == "python_stdlib"
    assert [note.partition(" ")[0] for note in notes] == ["substitute:", "substitute:"]
    assert with_substitutes(config.load("debug", []), tmp_path)[1] == []


def test_rounding_of_states_is_off_in_float32():
    options = ["--optimizer.bf16_stochastic_round", "true", "--optimizer.state_dtype", "bfloat16"]
    task = verify.plan(config.load(None, options), VerifyOptions(meshes=("tp=2",)))
    (plan,) = task.plans

    assert plan.problem == ""
    assert plan.loaded.config.optimizer.state_dtype == "default"

    task = verify.plan(config.load(None, options), VerifyOptions(meshes=("tp=2",), precision="own"))
    assert task.plans[0].loaded.config.optimizer.bf16_stochastic_round


NOT_PROVEN = {"llama3_8b_float8": ["precision"]}
"""Dimensions of presets in which rounding alone changes a small model as much as a fault would."""


def has_proven_part(dimensions: list[dict[str, Any]]) -> bool:
    """True if each dimension that is not proven with converters has equal results without them."""
    for dimension in dimensions:
        if dimension["verdict"] == "not proven":
            plain = [
                one
                for one in dimension["comparisons"]
                if one["compared"].endswith("converters off")
            ]
            if not plain or any(one["verdict"] != "same" for one in plain):
                return False
    return True


@pytest.mark.nightly("each takes up to a minute")
@pytest.mark.parametrize("name", presets.names())
def test_the_certificate_of_a_preset_holds(tmp_path, name, capsys):
    path = tmp_path / "certificate.json"
    status = cli.main(["verify", name, "--certificate", str(path), "--quick"])
    dimensions = json.loads(path.read_text())["dimensions"]

    assert has_proven_part(dimensions), dimensions

    verdicts = {dimension["name"]: dimension["verdict"] for dimension in dimensions}
    not_proven = [dimension for dimension, verdict in verdicts.items() if verdict == "not proven"]
    assert not_proven == NOT_PROVEN.get(name, []), capsys.readouterr()
    assert {"task", "accumulation", "resume"} <= {
        dimension for dimension, verdict in verdicts.items() if verdict == "holds"
    }
    assert set(verdicts.values()) <= {"holds", "does not apply", "not proven"}

    expected = 4 if not_proven else 0
    assert status == expected
    assert cli.main(["verify", name, "--check", str(path)]) == expected, capsys.readouterr()
