"""Adapters on any ``transformers`` architecture equal those of PEFT, and its folders can be read and written.

PEFT is the independent reference. Tolerances allow for a different float32 summation order.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import SHAPES, config_for, folder
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import train_whole
from torch import Tensor

from shardtrain import cli
from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.lora.linear import is_adapter
from shardtrain.tools.generate.trained_model import open_model
from shardtrain.train.run_folder import write_resolved_config

pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="PEFT is the reference of adapters")
TOLERANCE = 1e-5
HERE = "tests/lora/test_transformers.py::test_adapters_of_transformers_are_equal_on_every_mesh"
LORA = {"enable": True, "rank": 4, "alpha": 8.0}


def config_of(name: str, output: Path, **sections: Any) -> Config:
    lora = {**LORA, **sections.pop("lora", {})}
    options = {"optimizer": {"lr": 3e-2, "eps": 1e-3, "weight_decay": 0.0}, **sections}
    return config_for(name, output, lora=lora, **options)


def train(ranks: int, config: Config, stop_after: int | None = None) -> Any:
    ended = run_ranks(ranks, train_whole, config, stop_after)
    assert ended[0].error is None
    write_resolved_config(Loaded(config), Path(config.job.dump_folder), ranks)
    return ended[0]


def tokens() -> Tensor:
    return torch.randint(1, 256, (2, 24), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any) -> Tensor:
    out = model.eval()(tokens())
    return out if isinstance(out, Tensor) else out.logits


def plain(name: str) -> Any:
    import transformers

    return (
        getattr(transformers, SHAPES[name][0])
        .from_pretrained(folder(name), dtype=torch.float32)
        .eval()
    )


def exported(run: Path, output: Path, step: int = 3) -> Path:
    assert (
        cli.main(
            ["export", str(run / "checkpoint" / f"step-{step}"), "--to", str(output), "--adapter"]
        )
        == 0
    )
    return output


CASES = [
    ("gpt2", {}),  # Conv1D, all linear modules by default
    ("gpt2", {"use_dora": True, "target_modules": ["c_attn", "h.*.mlp.c_proj"]}),
    ("qwen3", {"target_modules": ["q_proj", "v_proj"], "rank_stabilized": True}),
    ("gpt_oss", {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    ("phi", {"use_dora": True}),  # linear layers and head with biases
]


@pytest.mark.parametrize(("name", "lora"), CASES)
def test_peft_opens_what_was_trained_and_merges_equally(
    name: str, lora: dict[str, Any], tmp_path: Path
) -> None:
    ended = train(1, config_of(name, tmp_path / "run", lora=lora))
    assert ended.losses[-1] < ended.losses[0]
    unmerged = logits(open_model(tmp_path / "run").model)
    effect = (unmerged - logits(plain(name))).abs().max()
    assert effect > 0.02, "the adapters have no effect, so the test would show nothing"

    adapters = exported(tmp_path / "run", tmp_path / "peft")
    model = peft.PeftModel.from_pretrained(plain(name), adapters)
    torch.testing.assert_close(logits(model), unmerged, atol=TOLERANCE, rtol=0)

    peft_weights = model.merge_and_unload().state_dict()
    step = str(tmp_path / "run" / "checkpoint" / "step-3")
    assert cli.main(["merge", step, "--to", str(tmp_path / "merged")]) == 0

    resolved = tmp_path / "run" / "config.resolved.toml"
    merged = open_model(tmp_path / "merged", resolved)
    torch.testing.assert_close(logits(merged.model), unmerged, atol=TOLERANCE, rtol=0)

    # The exported weights are those that PEFT merges.
    arguments = [
        "export",
        str(tmp_path / "merged"),
        "--to",
        str(tmp_path / "hf"),
        "--config",
        str(resolved),
    ]
    assert cli.main([*arguments, "--check", "weights"]) == 0

    ours = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        ours |= load_file(file)
    matched = {key: tensor for key, tensor in peft_weights.items() if key in ours}

    assert len(matched) >= len(ours) - 1
    for key, tensor in matched.items():
        torch.testing.assert_close(ours[key], tensor, atol=TOLERANCE, rtol=0, msg=key)


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "fsdp2 tp2": (4, {"tensor_parallel_degree": 2}),
}
EVERY = ["q_proj", "o_proj", "up_proj", "down_proj", "lm_head"]
"""Modules with outputs or inputs split over tensor-parallel ranks, and the head."""
SPLIT = [
    ("qwen3", "tp2", {"use_dora": True, "target_modules": EVERY}),
    ("gpt2", "fsdp2", {"use_dora": True}),
    (
        "gpt_oss",
        "fsdp2",
        {"target_parameters": ["experts.*_proj"], "target_modules": ["all-linear"]},
    ),
    pytest.param(
        "qwen3",
        "fsdp2 tp2",
        {"target_modules": EVERY},
        marks=pytest.mark.nightly("both at once", by=HERE),
    ),
    pytest.param("phi", "tp2", {"use_dora": True}, marks=pytest.mark.nightly("biases", by=HERE)),
]


@pytest.mark.parametrize(("name", "mesh", "lora"), SPLIT)
def test_adapters_of_transformers_are_equal_on_every_mesh(
    name: str, mesh: str, lora: dict[str, Any], tmp_path: Path
) -> None:
    """AdamW's eps is large, see ``tiny.py``."""
    import transformers

    plan = transformers.Qwen3Config.base_model_tp_plan
    if "tp" in mesh and "layers.*.self_attn.q_norm" not in plan:
        pytest.skip("the Qwen3 plan of this version lacks the norms of heads, and is rejected")
    folder(name)
    single = train(1, config_of(name, tmp_path / "alone", lora=lora))
    ranks, degrees = MESHES[mesh]
    split = train(ranks, config_of(name, tmp_path / "split", lora=lora, parallelism=degrees))

    # float32 sums in a different order
    assert split.losses == pytest.approx(single.losses, abs=1e-5)
    assert split.grad_norms == pytest.approx(single.grad_norms, abs=1e-4)

    # Adapters change equally, and frozen weights not at all.
    trained = 0
    for key, weight in single.weights.items():
        if is_adapter(key):
            torch.testing.assert_close(split.weights[key], weight, atol=TOLERANCE, rtol=0, msg=key)
            trained += 1
        else:
            assert torch.equal(split.weights[key], weight), key

    assert trained


@pytest.mark.nightly(
    "with adapters",
    by="tests/train/test_resume.py::test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one",
)
def test_a_run_resumes_on_another_mesh_and_starts_from_a_peft_folder(tmp_path: Path) -> None:
    lora = {"use_dora": True, "target_modules": ["q_proj", "down_proj"]}
    straight = train(1, config_of("qwen3", tmp_path / "straight", lora=lora))
    train(1, config_of("qwen3", tmp_path / "cut", lora=lora), stop_after=2)
    split = {"tensor_parallel_degree": 2}
    ended = train(2, config_of("qwen3", tmp_path / "cut", lora=lora, parallelism=split))

    # float32 sums in a different order
    assert ended.losses == pytest.approx(straight.losses[2:], abs=1e-5)

    # A step with a learning rate of 0 leaves the adapters as they were loaded.
    adapters = exported(tmp_path / "straight", tmp_path / "peft")
    start = {**lora, "initial_load_path": str(adapters)}
    no_update = {"optimizer": {"lr": 0.0}, "training": {"steps": 1}}
    train(1, config_of("qwen3", tmp_path / "again", lora=start, **no_update))

    expected = logits(open_model(tmp_path / "straight").model)
    actual = logits(open_model(tmp_path / "again").model)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_adapters_written_by_peft_survive_a_round_trip(tmp_path: Path) -> None:
    options = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "all-linear",
        "use_dora": True,
        "task_type": "CAUSAL_LM",
    }
    model = peft.get_peft_model(plain("gpt2"), peft.LoraConfig(**options, modules_to_save=["wpe"]))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.randn(parameter.shape, generator=generator) * 0.05
    model.save_pretrained(tmp_path / "theirs")
    lora = {
        "use_dora": True,
        "modules_to_save": ["wpe"],
        "initial_load_path": str(tmp_path / "theirs"),
    }
    train(
        1,
        config_of(
            "gpt2", tmp_path / "run", lora=lora, optimizer={"lr": 0.0}, training={"steps": 1}
        ),
    )

    torch.testing.assert_close(
        logits(open_model(tmp_path / "run").model), logits(model), atol=TOLERANCE, rtol=0
    )

    exported(tmp_path / "run", tmp_path / "ours", step=1)
    expected, actual = (
        load_file(tmp_path / side / "adapter_model.safetensors") for side in ("theirs", "ours")
    )
    assert expected.keys() == actual.keys()
    assert all(torch.equal(expected[key], actual[key]) for key in expected)

    configs = [
        json.loads((tmp_path / side / "adapter_config.json").read_text())
        for side in ("theirs", "ours")
    ]
    keys = ("r", "lora_alpha", "use_dora", "fan_in_fan_out", "task_type", "use_rslora", "bias")

    # PEFT accepts the last part of a module path or the full path. Exports write the full path.
    assert configs[1]["modules_to_save"] == ["transformer.wpe"]
    assert [configs[0][key] for key in keys] == [configs[1][key] for key in keys]
