"""A tiny model, a batch of verl, and engines that run it, for the checks of this folder."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import torch
from tensordict import NonTensorData
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3Config
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss

from shardtrain.compat.verl import ActorConfig, EngineConfig

VOCABULARY = 264


def make_model(folder: Path, **changes) -> Path:
    """Write a tiny Qwen3 with random weights, whose probabilities are far from uniform."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    model = AutoModelForCausalLM.from_config(
        Qwen3Config(**{**sizes, **changes}), dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return folder


def model_config(folder: Path, model_type="language_model", **changes) -> HFModelConfig:
    return HFModelConfig(
        path=str(folder),
        model_type=model_type,
        load_tokenizer=False,
        enable_gradient_checkpointing=False,
        **{"use_remove_padding": True, **changes},
    )


def optimizer_config(**changes) -> FSDPOptimizerConfig:
    # With a small eps, AdamW would amplify the rounding errors of small gradients.
    options = {"lr": 1e-2, "total_training_steps": 10, "override_optimizer_config": {"eps": 1e-3}}
    return FSDPOptimizerConfig(**{**options, **changes})


def shardtrain_engine(
    folder: Path,
    model_type="language_model",
    forward_only=False,
    model=None,
    optimizer=None,
    checkpoint=None,
    **options,
):
    config = EngineConfig(dtype="float32", forward_only=forward_only, **options)
    engine = EngineRegistry.new(
        model_type,
        "shardtrain",
        model_config=model or model_config(folder),
        engine_config=config,
        optimizer_config=optimizer or optimizer_config(),
        checkpoint_config=checkpoint or CheckpointConfig(),
    )
    engine.initialize()
    return engine


def fsdp_engine(folder: Path, model_type="language_model"):
    """Return verl's engine fsdp2, which is registered only for accelerators but also runs on this platform."""
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    try:
        engine = EngineRegistry.new(
            model_type,
            "fsdp2",
            model_config=model_config(
                folder, model_type, override_config={"attn_implementation": "eager"}
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                mixed_precision={
                    "param_dtype": "fp32",
                    "reduce_dtype": "fp32",
                    "buffer_dtype": "fp32",
                },
                use_torch_compile=False,
            ),
            optimizer_config=optimizer_config(),
            checkpoint_config=CheckpointConfig(),
        )
        engine.initialize()
    finally:
        del os.environ["VERL_ENGINE_DEVICE"]
    return engine


def batch(rank: int = 0, size: int = 1, rows: int = 8, micro_batch_size: int = 2):
    """Return a rank's part of a batch of GRPO: prompts and answers of different lengths with advantages."""
    generator = torch.Generator().manual_seed(5)
    columns: dict[str, list] = {}

    def add(name, tensor):
        columns.setdefault(name, []).append(tensor)

    for _ in range(rows):
        prompt = int(torch.randint(2, 9, (), generator=generator))
        answer = int(torch.randint(2, 14, (), generator=generator))
        tokens = torch.randint(0, VOCABULARY, (prompt + answer,), generator=generator)
        add("input_ids", tokens)
        add("position_ids", torch.arange(prompt + answer))
        add("loss_mask", torch.cat((torch.zeros(prompt), torch.ones(answer))).long())
        add("prompts", tokens[:prompt])
        add("responses", tokens[prompt:])
        add("response_mask", torch.ones(answer).long())
        add("old_log_probs", -6 + torch.randn(answer, generator=generator))
        add("ref_log_prob", -6 + torch.randn(answer, generator=generator))
        add("advantages", torch.randn(answer, generator=generator))
        add("values", torch.randn(answer, generator=generator))
        add("returns", torch.randn(answer, generator=generator))
    rows_of_rank = slice(rank * rows // size, (rank + 1) * rows // size)
    tensors = {}
    for name, parts in columns.items():
        tensors[name] = torch.nested.as_nested_tensor(parts[rows_of_rank], layout=torch.jagged)
    settings = {
        "use_remove_padding": True,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": micro_batch_size,
        "temperature": 0.7,
        "calculate_entropy": True,
        "global_batch_size": rows,
        "global_token_num": NonTensorData([len(tokens) for tokens in columns["input_ids"]]),
    }
    return tensordict_utils.get_tensordict(tensor_dict=tensors, non_tensor_dict=settings)


def policy_loss(**changes):
    """Return the PPO loss with clipping, an entropy bonus and a KL term."""
    options = {
        "rollout_n": 2,
        "use_dynamic_bsz": True,
        "entropy_coeff": 0.1,
        "use_kl_loss": True,
        "kl_loss_coef": 0.2,
    }
    return partial(ppo_loss, config=ActorConfig(**{**options, **changes}))


def full(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
