"""Blocks of ``transformers`` networks that run on parts of sequences between tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_architectures import hf_folder
from hf_meshes import FirstStep, difference, first_step, hf_tiny
from ranks import run_ranks
from tiers import cases
from tiny import make_run

from shardtrain import models
from shardtrain.config.schema import Config
from shardtrain.distributed.tensor_parallel import hf_plan, hf_sequences

pytest.importorskip("transformers")


def tensor_parallel(path: Path, output: Path, ranks: int, **training: Any) -> Config:
    return hf_tiny(path, output, parallelism={"tensor_parallel_degree": ranks}, training=training)


def step_and_norm_length(rank: int, config: Config) -> tuple[FirstStep, int]:
    """Return the first step, and the smallest sequence length that a norm received."""
    lengths = []
    call = torch.nn.Module.__call__

    def watch(module: Any, *inputs: Any, **keywords: Any) -> Any:
        is_trial = bool(inputs) and isinstance(inputs[0], torch.Tensor) and inputs[0].is_meta
        if type(module).__name__ == "LlamaRMSNorm" and not is_trial:
            lengths.append(inputs[0].size(1))
        return call(module, *inputs, **keywords)

    torch.nn.Module.__call__ = watch  # type: ignore[method-assign]
    return first_step(rank, config), min(lengths)


@pytest.mark.parametrize(("seq_len", "part"), cases([(32, 16)], nightly=[(33, 33)]))
def test_norms_run_on_parts_of_sequences_that_the_ranks_divide(
    seq_len: int, part: int, tmp_path: Path
) -> None:
    path = hf_folder("llama")
    expected = run_ranks(
        1, first_step, hf_tiny(path, tmp_path / "one", training={"seq_len": seq_len})
    )[0]
    results = run_ranks(
        2, step_and_norm_length, tensor_parallel(path, tmp_path / "split", 2, seq_len=seq_len)
    )

    assert difference([step for step, _ in results], expected) <= 1e-5
    assert [length for _, length in results] == [part, part]


def logits_of(rank: int, config: Config, length: int) -> torch.Tensor:
    run = make_run(rank, config)
    columns_BT = torch.arange(length)[None]
    with torch.no_grad():
        return run.runner.parts[0](columns_BT, columns_BT)


def test_pass_without_gradients_accepts_any_length(tmp_path: Path) -> None:
    """Generation adds one token at a time."""
    path = hf_folder("gemma2")
    expected = run_ranks(1, logits_of, hf_tiny(path, tmp_path / "one"), 7)[0]
    parallelism = {"tensor_parallel_degree": 2, "disable_loss_parallel": True}

    for logits in run_ranks(
        2, logits_of, hf_tiny(path, tmp_path / "split", parallelism=parallelism), 7
    ):
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def reason(name: str, forward: Callable[..., Any] | None = None, monkeypatch: Any = None) -> str:
    """Return why the blocks of an architecture run on full sequences, or "". ``forward`` replaces that of a block."""
    module = models.find("transformers")
    model: Any = models.build(module, module.Config(str(hf_folder(name))))
    if forward is not None:
        block_class = type(next(iter(model.blocks.values())))
        monkeypatch.setattr(block_class, "forward", forward(block_class.forward))
    config = tensor_parallel(Path(model.hf.name_or_path or hf_folder(name)), Path("unused"), 2)
    return hf_plan.resolve(model, config).unsplit_sequences


def mixing(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return original(self, hidden_states, **keywords).cumsum(1)

    return forward


def reading_layers_behind(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, hidden_states: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return original(self, hidden_states, **keywords) + self.mlp.up_proj(hidden_states).mean()

    return forward


def test_blocks_that_combine_tokens_run_on_full_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason("llama") == ""
    assert (
        reason("llama", mixing, monkeypatch)
        == "may combine tokens with cumsum in hf.model.layers.0"
    )


def test_blocks_that_use_a_part_of_a_child_run_on_full_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = models.find("transformers")
    model: Any = models.build(module, module.Config(str(hf_folder("llama"))))
    block_class = type(next(iter(model.blocks.values())))
    monkeypatch.setattr(block_class, "forward", reading_layers_behind(block_class.forward))

    with pytest.raises(
        hf_sequences.Unsplittable, match="calls hf.model.layers.0.mlp.up_proj on parts of sequences"
    ):
        hf_sequences.find(model, {}, set())


def test_split_layers_in_the_block_itself_run_on_full_sequences() -> None:
    assert "call hf.model.decoder.layers.0.fc1 directly, and this layer is split" in reason("opt")


def test_output_of_a_split_layer_is_scattered_if_the_module_returns_it() -> None:
    module = models.find("transformers")
    model: Any = models.build(module, module.Config(str(hf_folder("olmo2"))))
    styles = {path: style for path, style in _styles(model).items() if ".layers.0." in path}
    sequences = hf_sequences.find(model, styles, set())

    # attention of OLMo 2 gathers the output of o_proj from an input that is not split
    assert sequences.scattered == {"hf.model.layers.0.mlp.down_proj": "hf.model.layers.0.mlp"}
    assert "hf.model.layers.1.post_attention_layernorm" in sequences.partial


def _styles(model: Any) -> dict[str, str]:
    from shardtrain.layout import matches

    styles = {}
    for path, _ in model.named_modules():
        for pattern, style in model.tensor_plan.items():
            if matches(path, pattern):
                styles[path] = style
    return styles
