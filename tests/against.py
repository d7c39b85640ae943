"""Train ten steps with shardtrain and with another trainer, on the same weights and rows.

AdamW has a large eps in both: with a small eps, a rounding error of 1e-8 in a gradient becomes 1e-4 in a weight. The
other trainer receives the rows in the order in which shardtrain read them, so the order is not compared.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hub_folders import build, save
from ranks import run_ranks
from tiny import Ended, tiny_config, train_whole
from tiny_tokenizers import bpe_folder, with_post_processor

from shardtrain.config.schema import Config
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.hf.hub_model import recognise

STEPS = 10
BATCH = 4
SEQ_LEN = 48
SIZE = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}
WORDS = ["cat", "mat", "fire", "dog", "well", "Hello", "you", "today"]
CHAT = (
    "{{ style }}{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@functools.cache
def folder(style: str = "llama3") -> Path:
    """Return the folder of a randomly initialized Llama with a byte-level tokenizer of one style."""
    path = Path(tempfile.mkdtemp(prefix="shardtrain-tests-")) / "hf"
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    bpe_folder(path, tuple(tokens.values()), **tokens, chat_template=CHAT)
    with_post_processor(path, style)
    model = build("llama3", vocab_size=open_tokenizer(str(path)).vocab_size)
    return save(model, path)


def words(rng: random.Random, most: int) -> str:
    return " " + " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


@functools.cache
def pairs() -> list[dict[str, Any]]:
    """Return rows with a prompt, answers and a label. Each part starts with a space, so no token spans two parts."""
    rng = random.Random(0)
    return [
        {
            "prompt": "the" + words(rng, 4),
            "chosen": words(rng, 5),
            "rejected": words(rng, 6),
            "completion": words(rng, 5),
            "label": bool(i % 3),
        }
        for i in range(16)
    ]


def ours(
    rows: list[dict[str, Any]], style: str = "llama3", ranks: int = 1, **sections: dict[str, Any]
) -> Ended:
    """Train on the rows with shardtrain, with other options in ``sections``. Return the results of rank 0."""
    run = Path(tempfile.mkdtemp(prefix="shardtrain-tests-"))
    (run / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_ranks(ranks, train_whole, config_for(run, style, **sections))[0]  # type: ignore[no-any-return]


def config_for(run: Path, style: str = "llama3", **sections: dict[str, Any]) -> Config:
    hub_model = recognise(folder(style))
    defaults: dict[str, dict[str, Any]] = {
        "job": {"dump_folder": str(run)},
        "training": {
            "dataset": "jsonl", "dataset_path": str(run / "rows.jsonl"), "seq_len": SEQ_LEN, "steps": STEPS,
            "on_data_end": "repeat", "local_batch_size": BATCH, "global_batch_size": BATCH,
        },
        "optimizer": SIZE,
        "lr_scheduler": {"warmup_steps": 0, "decay_ratio": 0.0},
        "checkpoint": {
            "enable": True, "interval": 1000, "initial_load_path": str(folder(style)), "initial_load_in_hf": True,
        },
    }  # fmt: skip
    names = defaults.keys() | sections.keys()
    merged = {name: {**defaults.get(name, {}), **sections.get(name, {})} for name in names}
    config = tiny_config(**merged)
    model = dataclasses.replace(
        config.model,
        name=hub_model.name,
        flavor=hub_model.flavor,
        overrides=dict(hub_model.overrides),
        hf_assets_path=str(folder(style)),
    )
    return dataclasses.replace(config, model=model)


def options(cls: Any, **more: Any) -> Any:
    """Return arguments of the other trainer that match ``config_for``."""
    defaults = {
        "output_dir": tempfile.mkdtemp(prefix="shardtrain-tests-"),
        "per_device_train_batch_size": BATCH,
        "max_steps": STEPS,
        "learning_rate": SIZE["lr"],
        "adam_beta1": SIZE["beta1"],
        "adam_beta2": SIZE["beta2"],
        "adam_epsilon": SIZE["eps"],
        "weight_decay": SIZE["weight_decay"],
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "train_sampling_strategy": "sequential",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    return cls(**{**defaults, **more})


def theirs(
    make: Callable[[Any, Any], Any],
    style: str = "llama3",
    cls: str = "AutoModelForCausalLM",
    **named: Any,
) -> list[float]:
    """Return the loss of each step of another trainer, in a separate process.

    Args:
        make: Function from a model and a tokenizer to the trainer.
        style: Style of the tokenizer.
        cls: Name of the model class in ``transformers``.
        **named: Keyword arguments of ``from_pretrained``.
    """
    return run_ranks(1, _theirs, make, style, cls, named)[0]  # type: ignore[no-any-return]


def _theirs(
    _: int, make: Callable[[Any, Any], Any], style: str, cls: str, model_options: dict[str, Any]
) -> list[float]:
    import torch
    import transformers

    torch.distributed.destroy_process_group()  # the other trainer would treat this process as a rank
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    cls_ = getattr(transformers, cls)
    model = cls_.from_pretrained(folder(style), dtype=torch.float32, **model_options)
    trainer = make(model, transformers.AutoTokenizer.from_pretrained(folder(style)))
    # by default, the other trainer does not decay norms and biases
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    trainer.optimizer = torch.optim.AdamW(
        parameters,
        lr=SIZE["lr"],
        betas=(SIZE["beta1"], SIZE["beta2"]),
        eps=SIZE["eps"],
        weight_decay=SIZE["weight_decay"],
    )
    losses: list[float] = []
    step = trainer.training_step

    def recorded_step(*arguments: Any, **options: Any) -> Any:
        loss = step(*arguments, **options)
        losses.append(float(loss))
        return loss

    trainer.training_step = recorded_step
    trainer.train()
    # micro-batches per step; their losses are already divided by this number
    size = len(losses) // STEPS
    return [sum(losses[i * size : (i + 1) * size]) for i in range(STEPS)]


def in_order(rows: list[dict[str, Any]], ended: Ended, columns: tuple[str, ...]) -> Any:
    """Return the rows in the order in which shardtrain read them, as a dataset."""
    import datasets

    numbers = [number for step in ended.sample_ids for number in step]
    return datasets.Dataset.from_list(
        [{key: rows[number][key] for key in columns} for number in numbers]
    )


def assert_close(ended: Ended, losses: list[float]) -> None:
    """Assert that the losses agree to 1e-4 in each of ten steps, and change by much more."""
    assert ended.error is None, ended.error
    assert len(ended.losses) == len(losses) == STEPS
    difference = max(abs(a - b) for a, b in zip(ended.losses, losses, strict=True))
    assert difference <= 1e-4, (ended.losses, losses)
    assert abs(losses[-1] - losses[0]) > 1e-2
