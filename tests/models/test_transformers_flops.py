"""FLOPs of ``transformers`` networks count the experts that a token uses, and the tokens that it attends to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hf_architectures import hf_config, hf_folder
from torch import nn

from shardtrain import models
from shardtrain.metrics.flops import count_model
from shardtrain.models import expert_parameters

pytest.importorskip("transformers")

SEQ_LEN = 64
GQA_ATTENTION = 2 * 32 * 32 + 2 * 32 * 16
"""Weights of queries, output, keys and values: 4 heads and 2 key-value heads of 8 features."""
HEAD = 512 * 32
NORMS = 2 * 32


def swiglu(features: int) -> int:
    return 3 * 32 * features


def gpt_oss() -> tuple[int, int]:
    ffn = hf_config("gpt_oss").intermediate_size
    attention = GQA_ATTENTION + 2 * 32 + 2 * 16 + 4  # biases, and one sink per head
    expert = swiglu(ffn) + 2 * ffn + 32
    router = 4 * 32 + 4
    used = 2 * (attention + router + 2 * expert + NORMS) + HEAD + 32
    return used, 16 + SEQ_LEN  # a window of 16 tokens in the first layer


def deepseek_v3() -> tuple[int, int]:
    queries = 32 * 16 + 16 + 16 * 4 * (8 + 4)
    keys_and_values = 32 * (16 + 4) + 16 + 16 * 4 * (8 + 8)
    attention = queries + keys_and_values + 4 * 8 * 32
    dense = swiglu(hf_config("deepseek_v3").intermediate_size)
    experts = 4 * 32 + 2 * swiglu(16) + swiglu(16)  # router, chosen and shared
    return 2 * (attention + NORMS) + dense + experts + HEAD + 32, 2 * SEQ_LEN


def closed_form(name: str) -> tuple[int, int]:
    """Return the number of parameters that a token uses, and the sum over layers of tokens that it attends to."""
    ffn = hf_config(name).intermediate_size
    if name == "mixtral":
        layer = GQA_ATTENTION + 4 * 32 + 2 * swiglu(ffn) + NORMS
        return 2 * layer + HEAD + 32, 2 * SEQ_LEN
    if name == "qwen3_moe":
        layer = GQA_ATTENTION + 2 * 8 + 4 * 32 + 2 * swiglu(16) + NORMS
        return 2 * layer + HEAD + 32, 2 * SEQ_LEN
    if name == "glm4_moe":
        experts = 4 * 32 + 2 * swiglu(16) + swiglu(16)
        return 2 * (GQA_ATTENTION + NORMS) + swiglu(ffn) + experts + HEAD + 32, 2 * SEQ_LEN
    return gpt_oss() if name == "gpt_oss" else deepseek_v3()


def count(path: Any) -> tuple[int, float]:
    module = models.find("transformers")
    shape = models.shape_of(module, "folder", {"path": str(path)}, "rmsnorm")
    total, flops = count_model(models.build(module, shape), module.LAYOUT, shape)
    return total, flops(SEQ_LEN)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss", "glm4_moe", "deepseek_v3"])
def test_flops_equal_a_closed_form(name: str) -> None:
    used, attended = closed_form(name)
    # DeepSeek's queries and keys have 12 dimensions per head, and its values have 8. The mean is 10.
    head_dim = 10 if name == "deepseek_v3" else 8
    total, flops = count(hf_folder(name))
    # The total also counts the embedding and the inactive experts.
    assert total > used + HEAD
    assert flops == 6 * used + 12 * 4 * head_dim * attended


class Block(nn.Module):
    """A block with a router and a list of experts, as networks of ``transformers`` 4 have."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.top_k = 2
        self.gate = nn.Linear(8, num_experts)
        self.experts = nn.ModuleList([nn.Linear(8, 4, bias=False) for _ in range(num_experts)])
        self.shared_expert = nn.Linear(8, 4)


class Network(nn.Module):
    """Two blocks with 6 experts, and a list of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            get_text_config=lambda: SimpleNamespace(num_local_experts=6, num_experts=None)
        )
        self.layers = nn.ModuleList([Block(6), Block(6)])


def test_experts_in_lists_are_counted_like_stacks() -> None:
    network = Network()
    assert expert_parameters.idle_numel(network, 1) == 2 * (6 - 2) * 8 * 4
    for expert in network.layers[0].experts:
        expert.weight.requires_grad_(False)
    assert expert_parameters.idle_numel(network, 1, only_trained=True) == (6 - 2) * 8 * 4
