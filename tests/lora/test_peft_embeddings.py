"""PEFT adapters on the output layer and the embedding are loaded, or rejected with the actual reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import build, save
from lora_runs import adapter_config, logits, tokens, train
from safetensors.torch import load_file, save_file
from torch import Tensor

from shardtrain import cli
from shardtrain.tools.generate.trained_model import open_model
from shardtrain.utils.errors import CheckpointError, ConfigError

pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="PEFT is the reference of its format")
TOLERANCE = 1e-4
"""Tolerance for logits of about 1 with a different float32 summation order."""


def saved(
    targets: list[str], tmp_path: Path, tied: bool = False, **options: Any
) -> tuple[Path, Path, Tensor]:
    """Return a model folder, a PEFT folder with adapters on ``targets``, and the logits of both in PEFT."""
    base = save(build("llama3", tie_word_embeddings=tied), tmp_path / "base")
    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, **options)
    model = peft.get_peft_model(build("llama3", tie_word_embeddings=tied), config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        expected = model.eval()(tokens(260)).logits
    model.save_pretrained(tmp_path / "peft")
    return base, tmp_path / "peft", expected


@pytest.mark.parametrize(
    ("tied", "options"),
    [(False, {}), (False, {"use_dora": True}), (True, {})],
    ids=["own head", "own head, DoRA", "tied head"],
)
def test_adapters_on_the_head_have_the_logits_of_peft(
    tied: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    base, adapters, expected = saved(["q_proj", "lm_head"], tmp_path, tied, **options)
    assert "base_model.model.lm_head.base_layer.weight" in load_file(
        adapters / "adapter_model.safetensors"
    )

    opened = open_model(base, tokenizer_path="bytes", adapter=adapters)
    torch.testing.assert_close(logits(opened.model, 260), expected, atol=TOLERANCE, rtol=0)
    arguments = ["merge", str(adapters), "--to", str(tmp_path / "merged"), "--base", str(base)]
    if tied:
        assert cli.main(arguments) == 5  # merging would change the embedding, too
        return
    assert cli.main(arguments) == 0

    merged = open_model(tmp_path / "merged", tokenizer_path="bytes").model
    torch.testing.assert_close(logits(merged, 260), expected, atol=TOLERANCE, rtol=0)


def test_a_run_starts_from_adapters_on_the_head(tmp_path: Path) -> None:
    base, adapters, expected = saved(["q_proj", "lm_head"], tmp_path)
    lora = {
        "rank": 2,
        "alpha": 4.0,
        "target_modules": ["q_proj", "lm_head"],
        "initial_load_path": str(adapters),
    }
    config = adapter_config(
        base, tmp_path / "run", lora=lora, optimizer={"lr": 0.0}, training={"steps": 1}
    )

    assert train(1, config)[0].error is None

    # A learning rate of 0 leaves the adapters as they were loaded.
    actual = logits(open_model(tmp_path / "run").model, 260)
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


def test_adapters_for_other_weights_are_rejected(tmp_path: Path, capsys: Any) -> None:
    _, adapters, _ = saved(["q_proj", "lm_head"], tmp_path)
    other = save(build("llama3", seed=1), tmp_path / "other")
    message = "lm_head.base_layer.weight differs from the weights of the model"

    with pytest.raises(CheckpointError, match=message):
        open_model(other, tokenizer_path="bytes", adapter=adapters)
    assert (
        cli.main(["merge", str(adapters), "--to", str(tmp_path / "merged"), "--base", str(other)])
        == 5
    )
    assert message in capsys.readouterr().err

    # A rounded copy counts as the same weight.
    file = adapters / "adapter_model.safetensors"
    tensors = load_file(file)
    key = "base_model.model.lm_head.base_layer.weight"
    save_file({**tensors, key: tensors[key].bfloat16()}, file)
    open_model(tmp_path / "base", tokenizer_path="bytes", adapter=adapters)


def test_adapters_on_an_embedding_are_rejected_with_a_fix(tmp_path: Path) -> None:
    base, adapters, _ = saved(["q_proj", "embed_tokens"], tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"an adapter for model\.embed_tokens, of class Embedding, but only nn\.Linear and experts",
    ) as caught:
        open_model(base, tokenizer_path="bytes", adapter=adapters)
    assert (
        "merge it with PEFT (merge_and_unload), or train the module with lora.modules_to_save"
        in str(caught.value)
    )

    lora = {"target_modules": ["q_proj", "embed_tokens"]}
    message = str(train(1, adapter_config(base, tmp_path / "run", lora=lora))[0].error)
    assert "names embed, an embedding, but only linear modules" in message
    assert 'lora.modules_to_save = ["embed_tokens"]' in message

    # The suggested fix works.
    lora = {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}
    assert train(1, adapter_config(base, tmp_path / "fixed", lora=lora))[0].error is None
