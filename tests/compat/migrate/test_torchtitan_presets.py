"""The published presets of torchtrain and torchtitan have the same values here, and their models can be built."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from tiers import cases

from shardtrain import cli, config

PRESETS = Path(__file__).parents[2] / "fixtures" / "configs"
FAKE = ("--comm.mode", "fake_backend")

# v0.2.2, by hand: model, flavor, lr, warmup, decay ratio, decay, least rate, batch, length, steps, data, recompute
QWEN3_AND_DEEPSEEK = [
    ("qwen3_0.6b", "qwen3", "0.6B", 3e-4, 2, None, "linear", 0.0, 4, 4096, 10, "c4", "selective"),
    ("qwen3_1.7b", "qwen3", "1.7B", 8e-4, 20, None, "linear", 0.0, 4, 4096, 100, "c4", "selective"),
    ("qwen3_32b", "qwen3", "32B", 8e-4, 600, None, "linear", 0.0, 2, 4096, 3000, "c4", "full"),
    ("qwen3_moe_debug", "qwen3_moe", "debugmodel_moe", 3e-4, 2, None, "linear", 0.0, 4, 4096, 10, "c4_test",
     "selective"),
    ("deepseek_v3_debug_model", "deepseek_v3", "debugmodel", 8e-4, 2, 0.8, "linear", 0.0, 8, 2048, 10, "c4_test",
     "selective"),
    ("deepseek_v3_16b", "deepseek_v3", "16B", 2.2e-4, 200, 0.8, "cosine", 0.1, 8, 4096, 1000, "c4", "selective"),
    ("deepseek_v3_671b", "deepseek_v3", "671B", 2.2e-4, 2000, 0.8, "cosine", 0.1, 4, 4096, 10000, "c4", "selective"),
]  # fmt: skip


COLUMNS = "file, name, flavor, lr, warmup, ratio, decay, least, batch, length, steps, data, mode"


@pytest.mark.parametrize(COLUMNS, QWEN3_AND_DEEPSEEK, ids=[row[0] for row in QWEN3_AND_DEEPSEEK])
def test_presets_of_qwen3_and_deepseek_v3_keep_their_values(
    file, name, flavor, lr, warmup, ratio, decay, least, batch, length, steps, data, mode
):
    c = config.load(PRESETS / "torchtitan_v0_2_2" / f"{file}.toml").config
    assert (c.model.name, c.model.flavor, c.model.converters) == (name, flavor, [])

    o = c.optimizer
    assert (o.name, o.lr, o.eps, o.weight_decay) == ("AdamW", lr, 1e-8, 0.1)
    assert (o.beta1, o.beta2) == (0.9, 0.95)

    s = c.lr_scheduler
    assert (s.name, s.warmup_steps, s.decay_ratio) == ("warmup_stable_decay", warmup, ratio)
    assert (s.decay_type, s.min_lr_factor, s.total_steps) == (decay, least, None)

    t = c.training
    assert (t.local_batch_size, t.global_batch_size) == (batch, -1)
    assert (t.seq_len, t.steps) == (length, steps)
    assert (t.dataset, t.max_norm) == (data, 1.0)
    assert (t.dtype, t.mixed_precision_param) == ("float32", "bfloat16")

    p = c.parallelism
    assert (p.data_parallel_replicate_degree, p.data_parallel_shard_degree) == (1, -1)
    assert (p.tensor_parallel_degree, p.pipeline_parallel_degree) == (1, 1)
    assert p.context_parallel_degree == 1
    assert p.expert_parallel_degree == (8 if file == "deepseek_v3_16b" else 1)
    assert c.activation_checkpoint.mode == mode
    assert c.activation_checkpoint.selective_ac_option == "op"

    # The two large DeepSeek files compile the loss, and save only the model at the end.
    is_large_deepseek = file in ("deepseek_v3_16b", "deepseek_v3_671b")
    assert c.compile.enable is is_large_deepseek
    assert c.compile.components == (["loss"] if is_large_deepseek else ["model", "loss"])
    assert c.checkpoint.last_save_model_only is is_large_deepseek
    assert not c.checkpoint.enable

    is_deepseek = name == "deepseek_v3"
    filters = ["output", "router.gate"] if is_deepseek else ["output"]
    assert c.quantize.linear.float8.filter_fqns == filters
    assert c.checkpoint.export_dtype == ("float32" if is_deepseek else "float16")


# Ranks: the number of GPUs stated by the file or usual at its time. Parameters: from the papers and torchtitan's log,
# within 0.2 % of the rounded numbers of qwen3 and deepseek_v3.
BUILT = [
    ("torchtrain_2024_02/debug_model", 8, None),
    ("torchtitan_2024_04/debug_model", 8, None),
    ("torchtitan_2024_04/llama_7b", 8, "6.74B"),
    ("torchtitan_2024_04/llama_13b", 64, "13.02B"),
    ("torchtitan_2024_04/llama_70b", 64, "68.98B"),
    ("torchtitan_2025_02/debug_model", 8, None),
    ("torchtitan_2025_02/llama3_8b", 16, "8.03B"),
    ("torchtitan_2025_02/llama3_70b", 32, "70.55B"),
    ("torchtitan_2025_02/llama3_405b", 128, "405.85B"),
    ("torchtitan_v0_2_2/debug_model", 8, None),
    ("torchtitan_v0_2_2/llama3_8b", 8, "8.03B"),
    ("torchtitan_v0_2_2/llama3_70b", 64, "70.55B"),
    ("torchtitan_v0_2_2/llama3_405b", 128, "405.85B"),
    ("torchtitan_v0_2_2/qwen3_0.6b", 8, None),
    ("torchtitan_v0_2_2/qwen3_1.7b", 8, None),
    ("torchtitan_v0_2_2/qwen3_32b", 8, "32.76B"),
    ("torchtitan_v0_2_2/qwen3_moe_debug", 8, None),
    ("torchtitan_v0_2_2/deepseek_v3_debug_model", 8, None),
    ("torchtitan_v0_2_2/deepseek_v3_16b", 8, "15.71B"),
    ("torchtitan_v0_2_2/deepseek_v3_671b", 256, "671.03B"),
]
CHEAP = (
    "torchtrain_2024_02/debug_model",
    "torchtitan_2025_02/llama3_8b",
    "torchtitan_v0_2_2/deepseek_v3_debug_model",
)


def test_every_preset_is_built():
    assert {name for name, *_ in BUILT} == {
        str(f.relative_to(PRESETS))[:-5] for f in PRESETS.rglob("*.toml")
    }


@pytest.mark.parametrize(
    ("name", "ranks", "parameters"),
    cases(
        [row for row in BUILT if row[0] in CHEAP],
        nightly=[row for row in BUILT if row[0] not in CHEAP],
    ),
    ids=lambda value: value if isinstance(value, str) and "/" in value else "",
)
def test_an_unedited_preset_builds_at_its_number_of_ranks(
    monkeypatch, capsys, name, ranks, parameters
):
    """``NGPU=N COMM_MODE=fake_backend ./run_train.sh`` works without the tokenizer and data that a preset names."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "CONFIG_FILE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("NGPU", str(ranks))
    code = cli.main(["train", str(PRESETS / f"{name}.toml"), *FAKE])
    out, err = capsys.readouterr()

    assert code == 0, err
    assert f"builds rank 0 of {ranks} " in out
    assert "nothing was trained" in out
    assert parameters is None or f", {parameters} parameters\n" in out

    # The product of the mesh sizes is the requested number of ranks.
    sizes = re.findall(r"^  (?:pp|dp_replicate|dp_shard|cp|tp) +(\d+)", out, re.MULTILINE)
    assert len(sizes) == 5
    assert math.prod(map(int, sizes)) == ranks

    assert re.search(r"^  sum +[\d.]+ [GM]iB", out, re.MULTILINE)


def test_missing_requirements_are_reported_and_stop_training(monkeypatch, capsys):
    """A build without training only reports a missing tokenizer or float8 device. Training is refused."""
    monkeypatch.delenv("CONFIG_FILE", raising=False)
    file = str(PRESETS / "torchtitan_2025_02" / "llama3_405b.toml")
    loaded = config.load(file)
    notes = config.require_to_build(loaded, 128)
    missing = [line for line in notes if line.startswith("a training would stop here: ")]

    assert len(missing) == 1
    assert "model.tokenizer_path" in missing[0]
    # As errors of ``train``, the lines are the same as the notes of the build.
    assert cli.main(["train", file, "--nproc", "8"]) == 2

    err = capsys.readouterr().err
    assert all(line.removeprefix("a training would stop here: ") in err for line in missing)
    assert "needs float8 matmuls" in err
    assert "emulate = true" in err
