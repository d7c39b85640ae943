"""Linear layers with packed weights match nn.Linear. Only weights that no other module reads are packed."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from shardtrain.models import find
from shardtrain.ops import chosen_kernels
from shardtrain.ops.chosen_kernels import Kernels
from shardtrain.ops.cpu import onednn_linear, packed_linear
from shardtrain.ops.cpu.packed_linear import PackedLinear

pytestmark = pytest.mark.skipif(
    not packed_linear.is_available(torch.float32), reason="this build of PyTorch has no oneDNN"
)
NO_BFLOAT16 = pytest.mark.skipif(
    not packed_linear.is_available(torch.bfloat16),
    reason="this processor packs no bfloat16 weights",
)


@pytest.fixture(autouse=True)
def both_types_and_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        chosen_kernels, "_chosen", Kernels(packed_linear=2.0, packed_linear_float32=2.0)
    )
    monkeypatch.setattr(packed_linear, "_SMALLEST_NUMEL", {torch.bfloat16: 0, torch.float32: 0})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float32, 1e-6), pytest.param(torch.bfloat16, 2**-8, marks=NO_BFLOAT16)],
)
def test_values_match_linear(dtype: torch.dtype, tolerance: float, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 144, bias=bias, dtype=dtype)
    exact = nn.Linear(96, 144, bias=bias).double()
    exact.load_state_dict(layer.state_dict())
    packed = nn.Sequential(layer)

    assert packed_linear.use(packed)
    assert type(layer) is PackedLinear

    with torch.inference_mode():
        for shape in (
            (1,),
            (2,),
            (3,),
            (4,),
            (7,),
            (64,),
            (0,),
            (2, 0),
            (1, 1),
            (8, 1),
            (3, 5),
            (2, 1, 3),
        ):
            x = torch.randn(*shape, 96).to(dtype)
            actual = packed(x)
            assert actual.shape == (*shape, 144)
            assert actual.dtype == dtype
            # rounding of a sum, or of a 16-bit result; the largest values are about 2, hence the factor
            torch.testing.assert_close(
                actual.double(), exact(x.double()), rtol=0, atol=2 * tolerance
            )


def test_weight_is_unchanged_and_its_old_memory_is_freed() -> None:
    layer = nn.Linear(32, 48, bias=False)
    before = layer.weight.detach().clone()
    old = weakref.ref(layer.weight)
    packed_linear.use(nn.Sequential(layer))

    assert old() is None
    assert layer.weight.shape == (48, 32)
    assert torch.equal(layer.weight.to_dense(), before)


def test_tied_head_is_packed_and_the_embedding_keeps_its_weight() -> None:
    module = find("llama3")
    model = module.Model(module.Config(vocab_size=32, dim=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, ffn_dim=24, tied_embeddings=True)).requires_grad_(False)  # fmt: skip  # noqa: E501
    tokens_BT = torch.arange(6).view(2, 3)
    nn.init.normal_(model.embed.weight)
    expected = model(tokens_BT, torch.arange(3).expand(2, -1))

    assert packed_linear.use(model)
    assert type(model.head) is PackedLinear

    logits = model(tokens_BT, torch.arange(3).expand(2, -1))
    # float32 sums in a different order
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "layer", [Doubled(8, 8), nn.Linear(8, 8).double(), nn.Linear(8, 8).half(), nn.LayerNorm(8)]
)
def test_other_layers_and_dtypes_are_not_packed(layer: nn.Module) -> None:
    kind = type(layer)
    assert not packed_linear.use(nn.Sequential(layer))
    assert type(layer) is kind


@pytest.mark.parametrize(
    "kernels", [chosen_kernels.PYTORCH, Kernels(packed_linear=1.04, packed_linear_float32=-1.0)]
)
def test_nothing_is_packed_if_it_is_slower_or_failed(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen_kernels, "_chosen", kernels)
    assert not packed_linear.use(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16()))


def test_onednn_layers_are_packed_too() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    onednn_linear.use(model)
    assert packed_linear.use(model)
    assert type(model[0]) is PackedLinear


@pytest.mark.parametrize(
    ("dtype", "passes", "rows", "pays"),
    [
        pytest.param(torch.bfloat16, 128, 1, True, marks=NO_BFLOAT16),
        (torch.bfloat16, 8, 1, False),  # packing costs more than it saves
        (torch.float32, 128, 8, True),
        (torch.float32, 128, 1, False),  # unpacked weights are as fast for a single row
    ],
)
def test_packing_requires_enough_use(
    dtype: torch.dtype, passes: int, rows: int, pays: bool
) -> None:
    module = find("llama3")
    model = module.Model(module.Config(vocab_size=32, dim=16, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=8, ffn_dim=24)).to(dtype)  # fmt: skip  # noqa: E501
    assert packed_linear.use_where_it_pays(model, passes, rows) is pays

    # a model of a user may read the weight of a linear layer, so it is not packed
    users_model = nn.Sequential(nn.Linear(8, 8, dtype=dtype))
    assert not packed_linear.use_where_it_pays(users_model, passes, rows)
