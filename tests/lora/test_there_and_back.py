"""Adapters on a Hugging Face folder: trained, saved, resumed, merged, exported, and opened by PEFT."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from hub_folders import FAMILIES, build, save
from lora_runs import adapter_config, logits, tokens, train
from ranks import run_ranks
from tiers import cases
from tiny import make_run

from shardtrain import cli
from shardtrain.checkpoint import manifest, tensors
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.distributed.process_group import World
from shardtrain.lora.linear import is_adapter
from shardtrain.ops.dtensor import to_full
from shardtrain.tools.generate.trained_model import open_model
from shardtrain.train import resume
from shardtrain.train.trainer import step

pytest.importorskip("transformers")
TOLERANCE = 1e-5
"""Tolerance for logits of about 1 with a different float32 summation order."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save(build("llama3"), tmp_path_factory.mktemp("base") / "llama3")


@pytest.fixture(scope="module")
def run(base, tmp_path_factory):
    """A run of four steps, resumed from a checkpoint after two."""
    folder = tmp_path_factory.mktemp("run")
    config = adapter_config(base, folder, checkpoint={"interval": 2})
    train(1, config, stop_after=2)
    ended = train(1, config)[0]
    assert ended.error is None
    assert len(ended.losses) == 2
    return folder, ended


def test_a_checkpoint_contains_only_adapters_and_their_optimizer(run):
    stored = manifest.read(run[0] / "checkpoint" / "step-4")
    names = {name for name in stored.tensors if name.startswith("model.")}
    assert names
    assert all(is_adapter(name) for name in names)

    adapters = sum(
        4 * torch.Size(t.shape).numel() for n, t in stored.tensors.items() if n.startswith("model.")
    )
    # Each adapter has two moments of its size, and a step count.
    assert stored.total_bytes == 3 * adapters + 4 * len(names)

    num_model_weights = sum(weight.numel() for weight in run[1].weights.values())
    assert adapters == 4 * sum(
        weight.numel() for name, weight in run[1].weights.items() if is_adapter(name)
    )
    assert stored.total_bytes < 4 * num_model_weights


@pytest.mark.nightly(
    "with adapters",
    by="tests/train/test_resume.py::test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one",
)
def test_a_resumed_run_equals_an_uninterrupted_one_also_on_another_mesh(run, base, tmp_path):
    straight = train(1, adapter_config(base, tmp_path / "straight", checkpoint={"interval": 2}))[0]
    for name, weight in straight.weights.items():
        assert torch.equal(weight, run[1].weights[name]), name

    # Resume the checkpoint of one process on two ranks, with FSDP and with tensor parallelism.
    for parallelism in ({}, {"tensor_parallel_degree": 2}):
        folder = tmp_path / f"two-{len(parallelism)}"
        shutil.copytree(tmp_path / "straight", folder)
        shutil.rmtree(folder / "checkpoint" / "step-4")
        config = adapter_config(base, folder, parallelism=parallelism, checkpoint={"interval": 2})
        ended = train(2, config)[0]
        assert ended.error is None
        assert ended.losses == pytest.approx(straight.losses[2:], abs=1e-5)


def test_the_first_output_equals_that_of_the_frozen_weights(base, tmp_path):
    config = adapter_config(base, tmp_path, optimizer={"lr": 0.0}, training={"steps": 1})
    train(1, config)
    ours = logits(open_model(tmp_path).model, 260)
    with torch.no_grad():
        reference = build("llama3")(tokens(260)).logits

    # Two implementations of the model sum float32 numbers in a different order.
    torch.testing.assert_close(ours, reference, atol=1e-4, rtol=0)


def test_merged_weights_equal_the_adapters(run, tmp_path):
    folder = run[0]
    assert (
        cli.main(["merge", str(folder / "checkpoint" / "step-4"), "--to", str(tmp_path / "merged")])
        == 0
    )

    unmerged = logits(open_model(folder).model, 260)
    summed = logits(open_model(tmp_path / "merged", folder / "config.resolved.toml").model, 260)
    torch.testing.assert_close(summed, unmerged, atol=TOLERANCE, rtol=0)

    with torch.no_grad():
        frozen = build("llama3")(tokens(260)).logits
    # The adapters change the logits, so the comparison above is not trivial.
    assert (unmerged - frozen).abs().max() > 0.05
    assert (
        cli.main(
            ["export", str(tmp_path / "merged"), "--to", str(tmp_path / "hf"), "--check", "weights"]
        )
        == 0
    )

    import transformers

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(tokens(260)).logits, unmerged, atol=1e-4, rtol=0)


def split_logits(rank, folder):
    opened = open_model(folder, world=World(rank, 2, rank, torch.device("cpu")))
    return to_full(logits(opened.model, 260))


def test_tensor_parallel_ranks_compute_the_same_adapters(run):
    expected = logits(open_model(run[0]).model, 260)
    for split in run_ranks(2, split_logits, run[0]):
        torch.testing.assert_close(split, expected, atol=TOLERANCE, rtol=0)


def test_peft_opens_the_export_with_the_same_logits(run, base, tmp_path):
    folder = run[0]
    arguments = [
        "export",
        str(folder / "checkpoint" / "step-4"),
        "--to",
        str(tmp_path / "peft"),
        "--adapter",
    ]
    assert cli.main(arguments) == 0

    fields = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert fields["peft_type"] == "LORA"
    assert fields["task_type"] == "CAUSAL_LM"
    assert fields["bias"] == "none"
    assert fields["base_model_name_or_path"] == str(base)
    assert (fields["r"], fields["lora_alpha"], fields["use_rslora"]) == (4, 8.0, False)
    assert fields["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]

    numbers = sum(w.numel() for name, w in run[1].weights.items() if is_adapter(name))
    size = (tmp_path / "peft" / "adapter_model.safetensors").stat().st_size
    assert 4 * numbers < size < 4 * numbers + 200 * 2 * 8 + 200  # plus a header line per tensor

    unmerged = logits(open_model(folder).model, 260)
    peft = pytest.importorskip("peft", reason="PEFT is the reference of its format")
    reference = peft.PeftModel.from_pretrained(build("llama3"), tmp_path / "peft")
    with torch.no_grad():
        torch.testing.assert_close(
            reference.eval()(tokens(260)).logits, unmerged, atol=1e-4, rtol=0
        )


def test_a_run_starts_from_peft_adapters_and_they_can_be_merged(base, tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is the reference of its format")
    options = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=True
    )
    model = peft.get_peft_model(build("llama3"), options)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        expected = model.eval()(tokens(260)).logits
    model.save_pretrained(tmp_path / "peft")
    arguments = [
        "merge",
        str(tmp_path / "peft"),
        "--to",
        str(tmp_path / "merged"),
        "--base",
        str(base),
    ]
    assert cli.main(arguments) == 0

    lora = {
        "target_modules": ["q_proj", "v_proj", "w2"],
        "initial_load_path": str(tmp_path / "peft"),
    }
    config = adapter_config(
        base,
        tmp_path / "run",
        lora={**lora, "rank_stabilized": True},
        optimizer={"lr": 0.0},
        training={"steps": 1},
    )

    assert train(1, config)[0].error is None

    ours = logits(open_model(tmp_path / "run").model, 260)
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    merged = logits(
        open_model(tmp_path / "merged", tmp_path / "run" / "config.resolved.toml").model, 260
    )
    torch.testing.assert_close(merged, expected, atol=1e-4, rtol=0)
    # Generation can also use the adapters with a shardtrain checkpoint of the base model.
    assert cli.main(["import", str(base), "--to", str(tmp_path / "imported")]) == 0

    opened = open_model(
        tmp_path / "imported", tmp_path / "run" / "config.resolved.toml", adapter=tmp_path / "peft"
    )
    torch.testing.assert_close(logits(opened.model, 260), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("base_dtype", cases(["training"], nightly=["int8"]))
def test_dora_matches_peft_and_merges_equally(base, base_dtype, tmp_path):
    """With 8-bit weights, only the merge is compared, because PEFT has another 8-bit format."""
    lora = {
        "use_dora": True,
        "target_modules": ["q_proj", "o_proj", "w2"],
        "base_dtype": base_dtype,
    }
    ended = train(1, adapter_config(base, tmp_path / "run", lora=lora))[0]

    assert ended.error is None
    assert ended.losses[-1] < ended.losses[0]

    step = str(tmp_path / "run" / "checkpoint" / "step-4")
    unmerged = logits(open_model(tmp_path / "run").model, 260)
    assert cli.main(["merge", step, "--to", str(tmp_path / "merged")]) == 0

    merged = open_model(tmp_path / "merged", tmp_path / "run" / "config.resolved.toml")
    torch.testing.assert_close(logits(merged.model, 260), unmerged, atol=TOLERANCE, rtol=0)

    if base_dtype != "training":
        return
    # PEFT computes the same logits with the exported adapters.
    peft = pytest.importorskip("peft", reason="PEFT is the reference of its format")
    assert cli.main(["export", step, "--to", str(tmp_path / "peft"), "--adapter"]) == 0

    reference = peft.PeftModel.from_pretrained(build("llama3"), tmp_path / "peft")
    with torch.no_grad():
        logits_of_peft = reference.eval()(tokens(260)).logits
    torch.testing.assert_close(logits_of_peft, unmerged, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "family",
    ["mistral", "qwen2", "qwen3_moe", "mixtral", "deepseek_v3", "neox", "llama4", "gpt_oss"],
)
def test_every_family_trains_adapters_and_merges_them(family, tmp_path):
    folder = save(build(family), tmp_path / "base")
    config = adapter_config(folder, tmp_path / "run")
    if family == "qwen2":  # start this family from a shardtrain checkpoint
        imported = str(tmp_path / "imported")
        assert cli.main(["import", str(folder), "--to", imported]) == 0
        checkpoint = dataclasses.replace(
            config.checkpoint, initial_load_path=imported, initial_load_in_hf=False
        )
        config = dataclasses.replace(config, checkpoint=checkpoint)
    ended = train(1, config)[0]

    assert ended.error is None
    assert ended.losses[-1] < ended.losses[0]

    checkpoint = tmp_path / "run" / "checkpoint" / "step-4"
    unmerged = logits(open_model(tmp_path / "run").model, FAMILIES[family][1]["vocab_size"])
    assert cli.main(["merge", str(checkpoint), "--to", str(tmp_path / "merged")]) == 0

    # float32 rounding of the merged weights
    summed = open_model(tmp_path / "merged", tmp_path / "run" / "config.resolved.toml")
    torch.testing.assert_close(logits(summed.model, 260), unmerged, atol=3e-5, rtol=0)

    status = cli.main(["export", str(checkpoint), "--to", str(tmp_path / "peft"), "--adapter"])
    # GPT-NeoX fuses queries, keys and values, so the export to PEFT may reject its adapters.
    assert status == 0 or family == "neox"


def changed_by_ten_steps(rank, config):
    run = make_run(rank, config)
    resume.resume(run, Checkpoints(config))
    before = {name: tensor.clone() for name, tensor in run.model_state_dict().items()}
    for _ in range(10):
        step(run)
    changed = []
    for name, tensor in run.model_state_dict().items():
        if not torch.equal(tensor, before[name]):
            changed.append(name)
    return changed, before


def test_frozen_weights_and_router_biases_stay_unchanged(tmp_path):
    folder = save(build("deepseek_v3"), tmp_path / "base")
    config = adapter_config(folder, tmp_path / "run", training={"steps": 10})
    [(changed, before)] = run_ranks(1, changed_by_ten_steps, config)

    assert changed
    assert all(is_adapter(name) for name in changed)
    assert cli.main(["import", str(folder), "--to", str(tmp_path / "imported")]) == 0

    stored = manifest.read(tmp_path / "imported")
    assert {name for name in before if not is_adapter(name)} == stored.tensors.keys()
    assert any(name.endswith("expert_bias") for name in stored.tensors)
    for name in stored.tensors:
        assert torch.equal(before[name], tensors.read_whole(stored, tmp_path / "imported", name)), (
            name
        )
