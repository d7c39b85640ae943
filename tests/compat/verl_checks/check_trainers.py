"""verl's own configuration and SFT trainer with the engine of shardtrain. Run by tests/compat/test_verl.py."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pandas
import pytest
from hydra import compose, initialize_config_module
from omegaconf import open_dict
from ranks import run_ranks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from verl.utils.config import omega_conf_to_dataclass
from verl_runs import make_model

SEARCH_PATH = "hydra.searchpath=[pkg://shardtrain.compat.verl.hydra_configs]"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a byte-level tokenizer and a chat template, and a file of chats."""
    folder = make_model(tmp_path_factory.mktemp("model"))
    special = ["<|im_start|>", "<|im_end|>", "<pad>"]
    letters = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *special]
    bytes_only = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_only,
        eos_token=special[1],
        pad_token=special[2],
        additional_special_tokens=special[:1],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    chats = []
    for number in range(24):
        question = {"role": "user", "content": "?" * (number % 5 + 1)}
        answer = {"role": "assistant", "content": "yes " * (number % 7 + 1)}
        chats.append({"messages": [question, answer]})
    pandas.DataFrame(chats).to_parquet(folder / "chats.parquet")
    return folder


def composed(name: str, *overrides: str) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, overrides=[SEARCH_PATH, *overrides])


def test_verls_ppo_configuration_selects_the_engine_for_all_roles(folder):
    config = composed(
        "ppo_trainer",
        "model_engine=shardtrain",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2",
        "actor_rollout_ref.actor.shardtrain.tensor_parallel_degree=2",
        "+actor_rollout_ref.actor.shardtrain.options.compile.enable=true",
        "critic.ppo_micro_batch_size_per_gpu=2",
        f"critic.model.path={folder}",
    )
    reference = config.actor_rollout_ref.ref
    # as verl's worker does before it creates the reference policy
    with open_dict(reference):
        for name in [name for name in reference if name.startswith("log_prob")]:
            reference.pop(name)
        reference.ppo_micro_batch_size_per_gpu = 2
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    frozen = omega_conf_to_dataclass(reference)
    critic = omega_conf_to_dataclass(config.critic)

    assert [part.engine.strategy for part in (actor, frozen, critic)] == ["shardtrain"] * 3
    assert actor.engine.tensor_parallel_degree == frozen.engine.tensor_parallel_degree == 2
    assert frozen.engine.options == {"compile": {"enable": True}}
    assert frozen.engine.forward_only and not actor.engine.forward_only
    assert critic.engine.tensor_parallel_degree == 1


def fine_tune(rank: int, folder: Path, output: Path, *overrides: str) -> None:
    """Train with verl's SFT trainer, and log to ``output/metrics.jsonl``."""
    from verl.trainer.sft_trainer import SFTTrainer

    # verl's workers require these variables, but the process group exists already
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0", LOCAL_WORLD_SIZE="1")
    os.environ["VERL_FILE_LOGGER_PATH"] = str(output / "metrics.jsonl")
    config = composed(
        "sft_trainer_engine",
        f"model.path={folder}",
        "model.enable_gradient_checkpointing=false",
        f"data.train_files={folder / 'chats.parquet'}",
        f"data.val_files={folder / 'chats.parquet'}",
        "data.train_batch_size=8",
        "data.max_token_len_per_gpu=200",
        "data.num_workers=0",
        "optim.lr=1e-2",
        "optim.lr_scheduler_type=cosine",
        "+optim.override_optimizer_config.eps=1e-3",
        "trainer.total_epochs=2",
        "trainer.logger=[file]",
        "trainer.test_freq=3",
        "trainer.device=cpu",
        f"trainer.default_local_dir={output}",
        *overrides,
    )
    SFTTrainer(config).fit()


def losses(num_ranks: int, folder: Path, output: Path, *overrides: str) -> list[dict[str, float]]:
    """Return the metrics of all steps that are losses, norms or rates."""
    output.mkdir(exist_ok=True)
    run_ranks(num_ranks, fine_tune, folder, output, *overrides)
    names = ("train/loss", "train/grad_norm", "train/lr", "val/loss")
    metrics_of_steps = []
    for line in (output / "metrics.jsonl").read_text().splitlines():
        data = json.loads(line)["data"]
        metrics_of_steps.append({name: data[name] for name in names if name in data})
    return metrics_of_steps


SHARDTRAIN = ("engine=shardtrain", "engine.dtype=float32")


@pytest.fixture(scope="module")
def reference(folder, tmp_path_factory):
    """Metrics of the same training with verl's engine fsdp2."""
    os.environ["VERL_ENGINE_DEVICE"] = "cuda"
    try:
        return losses(
            1,
            folder,
            tmp_path_factory.mktemp("fsdp2"),
            "engine.strategy=fsdp2",
            "engine.use_torch_compile=false",
            "+engine.mixed_precision={param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}",
            "+model.override_config.attn_implementation=eager",
        )
    finally:
        del os.environ["VERL_ENGINE_DEVICE"]


@pytest.mark.parametrize(
    "num_ranks, overrides", [(1, ()), (2, ()), (2, ("engine.tensor_parallel_degree=2",))]
)
def test_verls_sft_trainer_gives_the_metrics_of_its_own_engine(
    folder, reference, tmp_path, num_ranks, overrides
):
    ours = losses(num_ranks, folder, tmp_path / "run", *SHARDTRAIN, *overrides)
    assert len(ours) == len(reference) >= 8
    for line, expected in zip(ours, reference, strict=True):
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)


def test_verls_sft_trainer_resumes_on_another_mesh(folder, tmp_path):
    """The resumed run restores weights, optimizer state and the learning rate, in the middle of its warmup."""
    schedule = (
        *SHARDTRAIN,
        "optim.lr_scheduler_type=constant",
        "optim.lr_warmup_steps=5",
        "trainer.test_freq=-1",
    )
    expected = losses(1, folder, tmp_path / "whole", *schedule, "trainer.total_training_steps=5")
    stopped = tmp_path / "stopped"
    first = losses(
        2,
        folder,
        stopped,
        *schedule,
        "trainer.total_training_steps=2",
        "engine.tensor_parallel_degree=2",
    )
    (stopped / "metrics.jsonl").unlink()
    rest = losses(1, folder, stopped, *schedule, "trainer.total_training_steps=5")
    steps = [line for line in first + rest if "train/loss" in line]

    assert len(steps) == 5
    for line, same in zip(steps, [line for line in expected if "train/loss" in line], strict=True):
        assert line == pytest.approx(same, rel=1e-4, abs=1e-5)
