"""Certificates of every kind of task and of the presets, and replacements for missing data."""

from __future__ import annotations

import json

import pytest

from shardtrain import cli, config
from shardtrain.config import presets
from shardtrain.tools import verify
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


@pytest.mark.parametrize("task", ["preference", "kto", "classification"])
def test_a_wrong_divisor_of_a_task_is_seen(check, monkeypatch, task):
    monkeypatch.setattr(StepSums, "all_reduce", lambda self, _: self)
    result = check("task", "--task.name", task, *TASKS[task], meshes=("dp_shard=2",))
    assert result.verdict == "differs" and "in step 1" in result.comparisons[0].first, result


def test_missing_data_and_tokenizers_are_replaced_and_named(tmp_path):
    loaded, notes = with_substitutes(config.load("llama3_8b", []), tmp_path)
    assert loaded.config.model.hf_assets_path == "bytes" and loaded.config.training.dataset == "python_stdlib"
    assert [note.partition(" ")[0] for note in notes] == ["substitute:", "substitute:"]
    assert with_substitutes(config.load("debug", []), tmp_path)[1] == []


def test_rounding_of_states_is_off_in_float32():
    options = ["--optimizer.bf16_stochastic_round", "true", "--optimizer.state_dtype", "bfloat16"]
    task = verify.plan(config.load(None, options), VerifyOptions(meshes=("tp=2",)))
    (plan,) = task.plans
    assert plan.problem == "" and plan.loaded.config.optimizer.state_dtype == "default"
    task = verify.plan(config.load(None, options), VerifyOptions(meshes=("tp=2",), precision="own"))
    assert task.plans[0].loaded.config.optimizer.bf16_stochastic_round


NOT_PROVEN = {"llama3_8b_float8": ["precision"]}
"""Dimensions of presets in which rounding alone changes a small model as much as a fault would."""


@pytest.mark.nightly("each takes up to a minute")
@pytest.mark.parametrize("name", presets.names())
def test_the_certificate_of_a_preset_holds(tmp_path, name, capsys):
    path = tmp_path / "certificate.json"
    status = cli.main(["verify", name, "--certificate", str(path), "--quick"])
    dimensions = json.loads(path.read_text())["dimensions"]
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
