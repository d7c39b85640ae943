"""Generated tokens do not depend on the KV cache, the batch size or the other rows."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from tiny import SHAPE
from torch import nn
from torch.nn import functional as F

from shardtrain.config.model_file import model_names
from shardtrain.models import build, find, shape_of
from shardtrain.models.layers import AttentionCore
from shardtrain.ops import init_weights
from shardtrain.ops.sampling import Sampling
from shardtrain.tools.generate import cache
from shardtrain.tools.generate.cache import BLOCK, CachedCore, installed
from shardtrain.tools.generate.engine import Generator
from shardtrain.utils.errors import ConfigError, NumericalError

VOCAB = SHAPE["vocab_size"]
EXPERTS = {"num_experts": 8, "top_k": 2, "moe_ffn_dim": 64, "kv_lora_rank": 32}
GREEDY = Sampling()
DRAWN = Sampling(repetition_penalty=1.2, temperature=1.0, top_k=50, top_p=0.9)


def tiny(family, layers=2, **overrides):
    """A small model with influential layers: a wrong mask or position changes tokens."""
    module = find(family)
    fields = {field.name for field in dataclasses.fields(module.Config)}
    known = {
        name: size for name, size in {**SHAPE, **EXPERTS, **overrides}.items() if name in fields
    }
    shape = shape_of(module, next(iter(module.FLAVORS)), {**known, "num_layers": layers}, "rmsnorm")
    names = [name for name, _ in build(module, shape).named_parameters()]
    draws = init_weights.plan(names, module.initial(shape), module.LAYOUT, shape.num_layers)
    model = module.Model(shape)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init_weights.draw_(parameter, name, draws[name], 0)
            if name.startswith("layers.") and parameter.ndim > 1:
                parameter.mul_(6)
    return model, module.LAYOUT


def prompts(*lengths):
    """Return random token ids, as many per prompt as its length."""
    rng = random.Random(0)
    rows = []
    for length in lengths:
        rows.append([rng.randrange(VOCAB) for _ in range(length)])
    return rows


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize(
    "family",
    [
        name
        for name in model_names()
        if getattr(find(name), "CAUSAL", True) and name != "transformers"
    ],
)
def test_neither_the_cache_nor_the_batch_changes_a_token(family, sampling):
    model, layout = tiny(family)
    inputs = prompts(5, 1, 17, 9)
    generated = Generator(model, layout).generate(inputs, 16, sampling, seed=3)

    assert [len(row) for row in generated] == [16] * 4
    assert len({tuple(row) for row in generated}) == 4
    assert (
        Generator(model, layout, use_cache=False).generate(inputs, 16, sampling, seed=3)
        == generated
    )
    for number, prompt in enumerate(inputs):
        assert Generator(model, layout).generate(
            [prompt], 16, sampling, seed=3, numbers=[number]
        ) == [generated[number]]


@pytest.mark.parametrize("lengths", [(5,), (5, 5), (5, 9)])
def test_the_head_receives_a_contiguous_tensor(lengths):
    # For a non-contiguous input, PyTorch uses a batched matmul, which copies the weight of the head per row.
    model, layout = tiny("llama3")
    inputs_of_head = []
    model.head.register_forward_pre_hook(lambda _, inputs: inputs_of_head.append(inputs[0]))
    Generator(model, layout).generate(prompts(*lengths), 3)
    size = model.head.in_features

    assert len(inputs_of_head) == 3
    for x in inputs_of_head:
        assert x.shape == (len(lengths), 1, size)
        assert x.stride() == (size, size, 1)


def test_passes_padded_to_a_multiple_of_ranks_change_no_token():
    model, layout = tiny("llama3")
    inputs = prompts(4, 11)
    assert Generator(model, layout, width=3).generate(inputs, 9, DRAWN) == Generator(
        model, layout
    ).generate(inputs, 9, DRAWN)


def test_rows_that_end_do_not_change_others():
    model, layout = tiny("qwen3")
    inputs = prompts(3, 8, 8, 1, 6)
    stops = frozenset(range(0, VOCAB, 9))
    unstopped = Generator(model, layout).generate(inputs, 24, DRAWN, seed=1)
    generated = Generator(model, layout).generate(inputs, 24, DRAWN, seed=1, stop_ids=stops)
    for row, unstopped_row in zip(generated, unstopped, strict=True):
        expected = []
        for token in unstopped_row:
            expected.append(token)
            if token in stops:
                break
        assert row == expected

    assert len({len(row) for row in generated}) > 2  # rows ended at different steps


def test_a_row_ends_when_its_watcher_stops_it():
    model, layout = tiny("llama3")
    inputs = prompts(3, 5)
    seen = []

    def watch(row, new):
        seen.append((row, list(new)))
        return row == 1 and len(new) == 2

    generated = Generator(model, layout).generate(inputs, 4, watch=watch)

    assert [len(row) for row in generated] == [4, 2]
    assert [new for row, new in seen if row == 0] == [generated[0][: n + 1] for n in range(4)]


def test_a_cache_that_grows_changes_no_token():
    model, layout = tiny("llama3", layers=1)
    inputs = prompts(3, 7)
    num_new = BLOCK + 40
    _, generated = Generator(model, layout).generate(inputs, num_new)

    # Compute the most likely token at each position in one forward pass of the full row, without a cache.
    row = torch.tensor([[*inputs[1], *generated]])
    positions = torch.arange(row.size(1))[None]
    with torch.no_grad():
        logits = model(row, positions)[0, len(inputs[1]) - 1 : -1]
    assert logits.argmax(-1).tolist() == generated
    assert len(generated) == num_new


# These families include windows, attention sinks, chunks and latent attention.
@pytest.mark.parametrize("family", ["llama3", "gpt_oss", "llama4", "deepseek_v3"])
def test_attention_with_matmuls_changes_no_token(family, monkeypatch):
    # The command uses this path in bfloat16. Test it in float32, because rounding then changes no token.
    model, layout = tiny(family)
    inputs = prompts(3, 40, 8, 1)
    stops = frozenset(range(0, VOCAB, 40))
    expected = Generator(model, layout, width=2).generate(inputs, 2 * BLOCK, DRAWN, stop_ids=stops)

    assert max(map(len, expected)) > BLOCK  # the rows are long enough to grow the cache

    monkeypatch.setattr(cache, "_has_fast_matmuls", lambda *_: True)
    for width in (1, 2):
        assert (
            Generator(model, layout, width=width).generate(inputs, 2 * BLOCK, DRAWN, stop_ids=stops)
            == expected
        )


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_with_matmuls_matches_float64(dtype, tokens):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, tokens, 8, 16, generator=generator).to(dtype)
    k = torch.randn(2, 4, 90, 16, generator=generator).to(dtype)
    v = torch.randn(2, 4, 90, 16, generator=generator).to(dtype)
    causal = torch.ones(90, 90, dtype=torch.bool).tril()
    mask = causal[None, None, 90 - tokens :].repeat(2, 1, 1, 1)
    mask[1, :, :, :20] = False  # padding before the first token of a row

    # The cache is longer than the tokens. Its unused end must not be read.
    cached_k = torch.full((2, 4, 128, 16), 7.0, dtype=dtype)
    cached_v = torch.full((2, 4, 128, 16), 7.0, dtype=dtype)
    cached_k[:, :, :90] = k
    cached_v[:, :, :90] = v
    transposed_k = cached_k.mT.contiguous().mT
    output = cache._attend_with_matmuls(q, transposed_k, cached_v, 90, mask, None)

    exact_q = q.double().transpose(1, 2)
    exact_k = k.double().repeat_interleave(2, dim=1)
    exact_v = v.double().repeat_interleave(2, dim=1)
    exact = F.scaled_dot_product_attention(exact_q, exact_k, exact_v, attn_mask=mask)
    exact = exact.transpose(1, 2)
    error = (output.double() - exact).norm() / exact.norm()
    # In bfloat16, scores and probabilities have 8 significant bits, as in block-wise attention.
    assert error < (1e-6 if dtype == torch.float32 else 8e-3)


def test_the_seed_and_the_number_of_a_row_decide_what_is_drawn():
    model, layout = tiny("llama3")
    (prompt,) = prompts(6)
    sampling = Sampling(temperature=1.0)
    first, again = Generator(model, layout).generate(
        [prompt, prompt], 12, sampling, seed=1, numbers=[0, 0]
    )

    assert first == again

    other = Generator(model, layout).generate(
        [prompt, prompt], 12, sampling, seed=1, numbers=[0, 7]
    )
    assert other[0] == first
    assert other[1] != first
    assert Generator(model, layout).generate([prompt], 12, sampling, seed=2) != [first]


def test_only_ids_of_the_tokenizer_are_chosen():
    model, layout = tiny("llama3")
    generated = Generator(model, layout, vocab_size=40).generate(
        prompts(4, 4), 30, Sampling(temperature=5.0)
    )
    assert max(map(max, generated)) < 40


def test_generation_does_not_change_the_model():
    model, layout = tiny("llama3")
    before = {name: type(module) for name, module in model.named_modules()}
    Generator(model, layout).generate(prompts(2), 2)

    assert {name: type(module) for name, module in model.named_modules()} == before

    tokens = torch.zeros(2, 3, dtype=torch.int64)
    # the head returns logits of all positions again
    assert model(tokens, torch.arange(3).expand(2, -1)).shape == (
        2,
        3,
        VOCAB,
    )


def test_weights_that_are_not_finite_are_an_error():
    model, layout = tiny("llama3")
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    for sampling in (GREEDY, DRAWN):
        with pytest.raises(NumericalError, match="not finite"):
            Generator(model, layout).generate(prompts(2), 2, sampling)


class Window(nn.Module):
    """A user-defined core in which each token attends to ``window`` tokens, including itself."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, q, k, v, documents=None):
        T = q.size(1)
        distance = torch.arange(T)[:, None] - torch.arange(T)
        mask = (distance >= 0) & ((distance < self.window) | (self.window == 0))
        q = q.transpose(1, 2)
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(
            1, 2
        )


class Doubled(nn.Module):
    """A core that does not compute softmax(q k / sqrt(H)) v."""

    def forward(self, q, k, v, documents=None):
        return AttentionCore()(q * 2, k, v, documents)


@pytest.mark.parametrize("window", [0, 4])
def test_user_defined_cores_and_windows_are_followed_exactly(window):
    model, layout = tiny("llama3")
    for layer in model.layers.values():
        layer.attn.core = Window(window)
    inputs = prompts(3, 9, 6)
    generated = Generator(model, layout).generate(inputs, 12)

    assert generated == Generator(model, layout, use_cache=False).generate(inputs, 12)
    assert (generated == Generator(*tiny("llama3")).generate(inputs, 12)) is (window == 0)


def test_a_core_with_other_math_is_rejected_and_works_without_a_cache():
    model, layout = tiny("llama3")
    for layer in model.layers.values():
        layer.attn.core = Doubled()
    with (
        pytest.raises(
            ConfigError,
            match=r'^LAYOUT\.context="layers\.0\.attn\.core": add --no_cache, or .*; reason: ',
        ),
        installed(model, layout),
    ):
        pass

    assert not any(isinstance(module, CachedCore) for module in model.modules())
    assert len(Generator(model, layout, use_cache=False).generate(prompts(3), 4)[0]) == 4


OTHERS = Path(__file__).parents[2] / "models" / "others"


# These models include a soft cap, ALiBi slopes, a head-first layout and a custom scale.
@pytest.mark.parametrize("name", ["gemma2", "bloom", "mpt", "gptj", "mup"])
def test_score_options_of_a_core_are_followed_exactly(name):
    module = find(str(OTHERS / f"{name}.py"))
    shape = shape_of(module, "tiny", {"num_layers": 2}, "rmsnorm")
    model = module.Model(shape)
    names = [name for name, _ in model.named_parameters()]
    draws = init_weights.plan(names, module.initial(shape), module.LAYOUT, 2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init_weights.draw_(parameter, name, draws[name], 0)
            if parameter.ndim > 1:
                parameter.mul_(3)
    inputs = prompts(3, 30, 6)
    generated = Generator(model, module.LAYOUT).generate(inputs, 12)

    assert generated == Generator(model, module.LAYOUT, use_cache=False).generate(inputs, 12)
    assert len({tuple(row) for row in generated}) == 3


def test_no_prompt_may_be_empty():
    model, layout = tiny("llama3", layers=1)
    with pytest.raises(ValueError, match="no token"):
        Generator(model, layout).generate([[1], []], 4)
    assert Generator(model, layout).generate([], 4) == []
