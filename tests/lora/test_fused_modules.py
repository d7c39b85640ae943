"""Adapters trained by PEFT on modules that are split or reordered here: the same logits, or an error with the reason.

Native families whose transformers class fuses modules are GPT-NeoX (q, k and v), gpt-oss and Llama 4 (experts). Others,
such as Phi-3 and GLM, use ``model.name = "transformers"`` and keep its modules.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import FAMILIES, SIZES, build, save
from lora_runs import adapter_config, logits, tokens, train
from tiers import cases
from torch import Tensor

from shardtrain import cli
from shardtrain.tools.generate.trained_model import open_model
from shardtrain.utils.errors import ConfigError

pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="PEFT is the reference of its format")
TOLERANCE = 1e-4
"""Tolerance for logits of about 1 with a different float32 summation order."""
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
FOREIGN = {
    "phi3": ("Phi3", {**SIZES, "pad_token_id": 0, "num_key_value_heads": 2}),
    "glm4": ("Glm4", {**SIZES, "pad_token_id": 0, "num_key_value_heads": 2, "head_dim": 8}),
    "falcon": ("Falcon", {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2}),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "neox": ("neox", {"target_modules": ["query_key_value"]}),
    "neox, DoRA": ("neox", {"target_modules": ["query_key_value", "dense"], "use_dora": True}),
    "neox, rank-stabilized": (
        "neox-sequential",
        {"target_modules": ["query_key_value"], "use_rslora": True},
    ),
    "gpt_oss": ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": STACKS}),
    "gpt_oss, one stack": (
        "gpt_oss",
        {"target_modules": ["q_proj"], "target_parameters": STACKS[:1]},
    ),
    "phi3": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "glm4": ("glm4", {"target_modules": ["q_proj", "gate_up_proj"]}),
}


@pytest.fixture(autouse=True)
def foreign_families(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, entry in FOREIGN.items():
        monkeypatch.setitem(FAMILIES, name, entry)


def saved(family: str, folder: Path, **options: Any) -> tuple[Path, Path, Tensor]:
    """Return a model folder, a PEFT folder with random adapters, and the logits of PEFT's merged model."""
    base = save(build(family), folder / "base")
    model = peft.get_peft_model(
        build(family), peft.LoraConfig(r=2, lora_alpha=4, task_type="CAUSAL_LM", **options)
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    model.save_pretrained(folder / "peft")
    with torch.no_grad():
        return base, folder / "peft", model.merge_and_unload().eval()(tokens(260)).logits


@pytest.mark.parametrize(
    "case",
    cases(["neox", "gpt_oss"], nightly=[name for name in CASES if name not in ("neox", "gpt_oss")]),
)
def test_generate_merge_and_train_match_peft_s_merged_model(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    base, adapters, expected = saved(family, tmp_path, **options)
    with torch.no_grad():
        assert (
            build(family)(tokens(260)).logits - expected
        ).abs().max() > 0.02  # otherwise the adapters have no effect
    opened = open_model(base, tokenizer_path="bytes", adapter=adapters)

    torch.testing.assert_close(logits(opened.model, 260), expected, atol=TOLERANCE, rtol=0)

    assert (
        cli.main(["merge", str(adapters), "--to", str(tmp_path / "merged"), "--base", str(base)])
        == 0
    )

    merged = open_model(tmp_path / "merged", tokenizer_path="bytes").model
    torch.testing.assert_close(logits(merged, 260), expected, atol=TOLERANCE, rtol=0)

    lora = {
        "rank": 2, "alpha": 4.0, "initial_load_path": str(adapters), "use_dora": options.get("use_dora", False),
        "rank_stabilized": options.get("use_rslora", False), "target_modules": options["target_modules"],
        "target_parameters": options.get("target_parameters", []),
    }  # fmt: skip
    config = adapter_config(
        base, tmp_path / "run", lora=lora, optimizer={"lr": 0.0}, training={"steps": 1}
    )

    assert train(1, config)[0].error is None
    torch.testing.assert_close(
        logits(open_model(tmp_path / "run").model, 260), expected, atol=TOLERANCE, rtol=0
    )


def test_peft_opens_adapters_of_interleaved_experts_that_were_trained_here(tmp_path: Path) -> None:
    base = save(build("gpt_oss"), tmp_path / "base")
    lora = {"target_parameters": STACKS, "target_modules": ["o_proj"]}
    assert train(1, adapter_config(base, tmp_path / "run", lora=lora))[0].error is None

    unmerged = logits(open_model(tmp_path / "run").model, 260)
    step = str(tmp_path / "run" / "checkpoint" / "step-4")
    assert cli.main(["export", step, "--to", str(tmp_path / "peft"), "--adapter"]) == 0

    model = peft.PeftModel.from_pretrained(build("gpt_oss"), tmp_path / "peft").eval()
    with torch.no_grad():
        logits_of_peft = model(tokens(260)).logits
    torch.testing.assert_close(logits_of_peft, unmerged, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("names", [STACKS, ["feed_forward.experts.down_proj"]])
def test_adapters_of_the_experts_of_llama4_are_refused_with_the_reason(
    names: list[str], tmp_path: Path, capsys
) -> None:
    reason = "PEFT swaps the inputs and outputs of the experts of Llama4ForCausalLM"
    base, adapters, _ = saved(
        "llama4", tmp_path, target_modules=["o_proj"], target_parameters=names
    )
    with pytest.raises(ConfigError, match=re.escape(reason)):
        open_model(base, tokenizer_path="bytes", adapter=adapters)
    assert (
        cli.main(["merge", str(adapters), "--to", str(tmp_path / "merged"), "--base", str(base)])
        == 2
    )
    assert reason in capsys.readouterr().err


def test_an_adapter_on_a_subclass_of_linear_is_rejected_with_its_class(tmp_path: Path) -> None:
    """Falcon's subclass of nn.Linear is equivalent, but other subclasses may not be."""
    base, adapters, _ = saved("falcon", tmp_path, target_modules=["query_key_value"])
    with pytest.raises(
        ConfigError, match=r"has an adapter for .*, of class FalconLinear, but only nn\.Linear"
    ):
        open_model(base, tokenizer_path="bytes", adapter=adapters)


def test_native_adapters_on_parts_of_a_fused_module_are_not_exported(
    tmp_path: Path, capsys
) -> None:
    base = save(build("neox"), tmp_path / "base")
    config = adapter_config(base, tmp_path / "run", lora={"target_modules": ["query_key_value"]})
    assert train(1, config)[0].error is None

    step = str(tmp_path / "run" / "checkpoint" / "step-4")
    assert cli.main(["export", step, "--to", str(tmp_path / "peft"), "--adapter"]) == 2
    message = capsys.readouterr().err
    assert "layers.0.attn.wq is a part of gpt_neox.layers.0.attention.query_key_value" in message
    assert "merge the adapters (shardtrain merge) and export the merged model" in message
