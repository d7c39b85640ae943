"""Adapters beside any architecture of ``transformers``: what PEFT computes, from its folders and back into them.

PEFT is the independent reference. Tolerances are those of float32 programs that add in another order.
"""

from __future__ import annotations

import dataclasses
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
from shardtrain.generate.opening import open_model
from shardtrain.lora.linear import is_adapter
from shardtrain.run_folder import write_resolved_config

pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="PEFT is the reference of adapters")
TOLERANCE = 1e-5
LORA = {"enable": True, "rank": 4, "alpha": 8.0}


def config_of(name: str, output: Path, **sections: Any) -> Config:
    lora = {**LORA, **sections.pop("lora", {})}
    given = {"optimizer": {"lr": 3e-2, "eps": 1e-3, "weight_decay": 0.0}, **sections}
    return config_for(name, output, lora=lora, **given)


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

    return getattr(transformers, SHAPES[name][0]).from_pretrained(folder(name), dtype=torch.float32).eval()


def exported(run: Path, output: Path, step: int = 3) -> Path:
    assert cli.main(["export", str(run / "checkpoint" / f"step-{step}"), "--to", str(output), "--adapter"]) == 0
    return output


CASES = [
    ("gpt2", {}),  # Conv1D, all linear modules by default
    ("gpt2", {"use_dora": True, "target_modules": ["c_attn", "h.*.mlp.c_proj"]}),
    ("qwen3", {"target_modules": ["q_proj", "v_proj"], "rank_stabilized": True}),
    ("mixtral", {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
    ("phi", {"use_dora": True}),  # biases, and a head with one
]


@pytest.mark.parametrize(("name", "lora"), CASES)
def test_peft_opens_what_was_trained_and_merges_equally(name: str, lora: dict[str, Any], tmp_path: Path) -> None:
    ended = train(1, config_of(name, tmp_path / "run", lora=lora))
    assert ended.losses[-1] < ended.losses[0]
    beside = logits(open_model(tmp_path / "run").model)
    assert (beside - logits(plain(name))).abs().max() > 0.02  # else nothing was added
    adapters = exported(tmp_path / "run", tmp_path / "peft")
    model = peft.PeftModel.from_pretrained(plain(name), adapters)
    torch.testing.assert_close(logits(model), beside, atol=TOLERANCE, rtol=0)
    theirs = model.merge_and_unload().state_dict()
    step = str(tmp_path / "run" / "checkpoint" / "step-3")
    assert cli.main(["merge", step, "--to", str(tmp_path / "merged")]) == 0
    resolved = tmp_path / "run" / "config.resolved.toml"
    torch.testing.assert_close(logits(open_model(tmp_path / "merged", resolved).model), beside, atol=TOLERANCE, rtol=0)
    words = ["export", str(tmp_path / "merged"), "--to", str(tmp_path / "hf"), "--config", str(resolved)]
    assert cli.main([*words, "--check", "weights"]) == 0
    ours = {name: tensor for file in (tmp_path / "hf").glob("*.safetensors") for name, tensor in load_file(file).items()}
    matched = {key: tensor for key, tensor in theirs.items() if key in ours}
    assert len(matched) >= len(ours) - 1
    for key, tensor in matched.items():
        torch.testing.assert_close(ours[key], tensor, atol=TOLERANCE, rtol=0, msg=key)
