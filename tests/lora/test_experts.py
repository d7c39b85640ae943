"""Adapters of stacked expert weights equal those of PEFT with ``target_parameters``, on every mesh."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hub_folders import FAMILIES, build, save
from lora_runs import adapter_config, logits, tokens, train
from tiers import cases

from shardtrain import cli
from shardtrain.lora.linear import is_adapter
from shardtrain.tools.generate.trained_model import open_model

pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="PEFT is the reference of adapters")
BOTH = {
    "target_parameters": ["experts.gate_up_proj", "mlp.experts.down_proj"],
    "target_modules": ["o_proj"],
}


@torch.no_grad()
def reference_logits(model: Any) -> torch.Tensor:
    return model.eval()(tokens(260)).logits


@pytest.mark.parametrize(
    ("family", "lora"),
    cases(
        [("qwen3_moe", BOTH), ("deepseek_v3", BOTH)],
        nightly=[
            ("mixtral", BOTH),
            ("mixtral", {"target_parameters": ["experts.down_proj"], "rank": 3}),
        ],
    ),
)
def test_peft_opens_adapters_of_experts_and_merges_equally(
    family: str, lora: dict[str, Any], tmp_path
) -> None:
    """Logits of about 1 may differ by 1e-4, because PEFT sums experts in a different order."""
    base = save(build(family), tmp_path / "base")
    ended = train(1, adapter_config(base, tmp_path / "run", lora=lora))[0]
    assert ended.error is None
    assert ended.losses[-1] < ended.losses[0]

    vocab = FAMILIES[family][1]["vocab_size"]
    unmerged = logits(open_model(tmp_path / "run").model, vocab)
    step = str(tmp_path / "run" / "checkpoint" / "step-4")
    assert cli.main(["export", step, "--to", str(tmp_path / "peft"), "--adapter"]) == 0

    fields = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert any("mlp.experts.down_proj" in name for name in fields["target_parameters"])
    model = peft.PeftModel.from_pretrained(build(family), tmp_path / "peft")
    torch.testing.assert_close(reference_logits(model), unmerged, atol=1e-4, rtol=0)

    merged = reference_logits(model.merge_and_unload())
    assert cli.main(["merge", step, "--to", str(tmp_path / "merged")]) == 0
    summed = logits(
        open_model(tmp_path / "merged", tmp_path / "run" / "config.resolved.toml").model, vocab
    )
    torch.testing.assert_close(summed, unmerged, atol=3e-5, rtol=0)
    torch.testing.assert_close(summed, merged, atol=1e-4, rtol=0)

    # A run can start from the adapters that PEFT writes.
    again = peft.PeftModel.from_pretrained(build(family), tmp_path / "peft")
    again.save_pretrained(tmp_path / "theirs")
    start = adapter_config(
        base,
        tmp_path / "again",
        lora={**lora, "initial_load_path": str(tmp_path / "theirs")},
        optimizer={"lr": 0.0},
        training={"steps": 1},
    )

    assert train(1, start)[0].error is None
    torch.testing.assert_close(
        logits(open_model(tmp_path / "again").model, vocab), unmerged, atol=1e-6, rtol=0
    )


def test_expert_adapters_that_peft_transposes_are_merged_but_not_exported(tmp_path, capsys) -> None:
    base = save(build("llama4"), tmp_path / "base")
    lora = {**BOTH, "target_parameters": ["experts.*_proj"]}
    ended = train(1, adapter_config(base, tmp_path / "run", lora=lora))[0]

    assert ended.error is None
    assert ended.losses[-1] < ended.losses[0]

    unmerged = logits(open_model(tmp_path / "run").model, 260)
    step = str(tmp_path / "run" / "checkpoint" / "step-4")
    assert cli.main(["export", step, "--to", str(tmp_path / "peft"), "--adapter"]) == 2
    assert "merge the adapters" in capsys.readouterr().err

    # The advice works: the merged model computes the same logits, up to float32 rounding.
    assert cli.main(["merge", step, "--to", str(tmp_path / "merged")]) == 0
    merged = open_model(tmp_path / "merged", tmp_path / "run" / "config.resolved.toml")
    torch.testing.assert_close(logits(merged.model, 260), unmerged, atol=3e-5, rtol=0)


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, {"expert_parallel_degree": 2}),
    "fsdp2": (2, {}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "fsdp4 ep2": (4, {"expert_parallel_degree": 2}),
    "pp2": (2, {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}),
}


@pytest.mark.parametrize("mesh", cases(["ep2"], nightly=[mesh for mesh in MESHES if mesh != "ep2"]))
def test_adapters_of_experts_are_equal_on_every_mesh(mesh: str, tmp_path) -> None:
    """The reference is one process with the same rows; see ``test_meshes.py``."""
    base = save(build("qwen3_moe"), tmp_path / "base")
    ranks, degrees = MESHES[mesh]
    rows = {"global_batch_size": 8, "local_batch_size": 8}
    single = train(1, adapter_config(base, tmp_path / "one", lora=BOTH, training=rows))[0]
    rows = {"global_batch_size": 8, "local_batch_size": 8 if mesh in ("tp2", "pp2") else 8 // ranks}
    split = train(
        ranks,
        adapter_config(base, tmp_path / "split", lora=BOTH, training=rows, parallelism=degrees),
    )
    for ended in split:
        assert ended.error is None
        assert ended.losses == pytest.approx(single.losses, abs=1e-5)
        assert ended.grad_norms == pytest.approx(single.grad_norms, abs=1e-4)

        for name, weight in ended.weights.items():
            same = torch.equal if not is_adapter(name) else torch.allclose
            assert same(
                weight, single.weights[name], **({"atol": 1e-5} if is_adapter(name) else {})
            ), name
