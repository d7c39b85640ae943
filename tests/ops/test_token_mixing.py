"""Operations that mix or count tokens outside of the attention core are detected by shapes. Valid models pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from other_styles import NOT_POSSIBLE
from tiers import cases
from torch import nn

from shardtrain import models
from shardtrain.ops import token_mixing

OTHERS = sorted((Path(__file__).parents[1] / "models" / "others").glob("*.py"))
SOUND = (Path(__file__).parents[1] / "tools/verify" / "sound_model.py").read_text()
IN_FFN = "return self.down(F.gelu(self.up(x)))"
IN_BLOCK = "        x = x + self.drop(self.attn("
ARANGE = "positions = torch.arange(tokens.size(1), device=tokens.device)[None]\n        "
EMBEDDED = "x = self.embed(tokens)\n"
# change -> errors of CP and of TP (None if accepted)
FAULTS: dict[str, tuple[str, str, str | None, str | None]] = {
    "nothing": (IN_FFN, IN_FFN, None, None),
    "a constant of its type": (
        EMBEDDED, EMBEDDED + "        x = x + x.new_ones(x.size(0), 1, 1)\n", None, None,
    ),
    "counted": (EMBEDDED, ARANGE + EMBEDDED, "counts its tokens with arange in the model's", None),
    "a shift in a gathered module": (
        IN_FFN, IN_FFN.replace("up(x)", "up(x + F.pad(x, (0, 0, 1, -1)))"), "with pad in blocks.0.ffn", None,
    ),
    "a shift on the residual stream": (
        IN_BLOCK, "        x = x + x.roll(1, dims=1)\n" + IN_BLOCK, "with roll in blocks.0,", "with roll in blocks.0,",
    ),
    "the mean of all tokens": (
        IN_BLOCK, "        x = x + x.mean(1, keepdim=True)\n" + IN_BLOCK,
        "with mean in blocks.0,", "with mean in blocks.0,",
    ),
    "attention outside the core": (
        IN_BLOCK, "        x = x + F.scaled_dot_product_attention(x, x, x)\n" + IN_BLOCK,
        "with scaled_dot_product_attention in blocks.0,", "with scaled_dot_product_attention in blocks.0,",
    ),
    "a running sum": (
        IN_FFN, "x = x.cumsum(1)\n        " + IN_FFN, "with cumsum in blocks.0.ffn", None,
    ),
    "a sum over features": (IN_FFN, "x = x.cumsum(-1) + x.mean(-1, keepdim=True)\n        " + IN_FFN, None, None),
}  # fmt: skip


def built(path: Path | str) -> tuple[nn.Module, Any]:
    module = models.find(str(path))
    flavor = next(iter(module.FLAVORS))
    return models.build(module, models.shape_of(module, flavor, {}, "rmsnorm")), module.LAYOUT


@pytest.mark.parametrize("name", FAULTS)
def test_operations_that_mix_split_tokens_are_named(name: str, tmp_path: Path) -> None:
    old, new, *expected = FAULTS[name]
    assert old in SOUND
    file = tmp_path / "mixing_model.py"
    file.write_text(SOUND.replace(old, new, 1))
    model, layout = built(file)
    for find, message in zip(
        (token_mixing.outside_of_cores, token_mixing.outside_of_gathered), expected, strict=True
    ):
        broken = find(model, layout)
        assert (broken is None) == (message is None), broken
        assert message is None or (broken is not None and message in broken.rule)


def test_second_core_missing_in_the_layout_is_found() -> None:
    model, layout = built("llama3")
    attention = model.get_submodule("layers.0.attn")
    attention.second = type(attention.core)()
    broken = token_mixing.outside_of_cores(model, layout)
    assert broken is not None
    assert broken.rule.startswith("has layers.0.attn.second of the same class AttentionCore")


def test_mixing_is_found_in_a_model_whose_layout_names_only_a_recurrence() -> None:
    model, layout = built("qwen3_next")
    layout = dataclasses.replace(layout, context="")
    model.layers = nn.ModuleDict({"0": model.layers["0"]})

    assert token_mixing.outside_of_cores(model, layout) is None

    broken = token_mixing.outside_of_cores(
        model, dataclasses.replace(layout, recurrence="layers.*.delta.other")
    )
    assert broken is not None
    assert "in layers.0.delta.core" in broken.rule


FAMILIES = [
    "qwen3_next",
    "llama3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "neox",
    "llama4",
    "gpt_oss",
]


@pytest.mark.parametrize(
    "path",
    cases([*FAMILIES, *OTHERS[::3]], nightly=[path for path in OTHERS if path not in OTHERS[::3]]),
    ids=lambda path: Path(path).stem,
)
def test_models_that_can_be_split_are_accepted(path: Path | str) -> None:
    model, layout = built(path)
    assert token_mixing.outside_of_gathered(model, layout) is None
    # t5_bias is rejected for another reason: its core has an additional argument
    if layout.context and "t5_bias" not in str(path):
        broken = token_mixing.outside_of_cores(model, layout)
        reason = NOT_POSSIBLE.get(Path(path).stem, {}).get("cp=2", "")
        mixes_outside = "outside of the attention core" in reason
        assert (broken is not None) == mixes_outside, broken
