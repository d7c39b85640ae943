"""Ten steps of a shardtrain run, and of the same rows by a trainer of others, on the same weights.

AdamW has a large eps on both sides: with a small one, rounding of 1e-8 in a gradient becomes 1e-4 in a weight. Rows
come to the others in the order in which ours were read, so that no order is compared.
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

STEPS, BATCH, SEQ_LEN = 10, 4, 48
SIZE = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}
WORDS = ["cat", "mat", "fire", "dog", "well", "Hello", "you", "today"]
CHAT = (
    "{{ style }}{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@functools.cache
def folder(style: str = "llama3") -> Path:
    """A Llama with weights of a start and a byte-level tokenizer in one style."""
    place = Path(tempfile.mkdtemp(prefix="shardtrain-tests-")) / "hf"
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    bpe_folder(place, tuple(names.values()), **names, chat_template=CHAT)
    with_post_processor(place, style)
    model = build("llama3", vocab_size=open_tokenizer(str(place)).vocab_size)
    return save(model, place)


def words(rng: random.Random, most: int) -> str:
    return " " + " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


@functools.cache
def pairs() -> list[dict[str, Any]]:
    """A prompt, two answers, and a label of the first. Words begin with a space, so that no token spans a boundary."""
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


def ours(rows: list[dict[str, Any]], style: str = "llama3", ranks: int = 1, **sections: dict[str, Any]) -> Ended:
    """A run on the rows; ``sections`` replace options."""
    run = Path(tempfile.mkdtemp(prefix="shardtrain-tests-"))
    (run / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return run_ranks(ranks, train_whole, config_for(run, style, **sections))[0]  # type: ignore[no-any-return]


def config_for(run: Path, style: str = "llama3", **sections: dict[str, Any]) -> Config:
    found = recognise(folder(style))
    given: dict[str, dict[str, Any]] = {
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
    merged = {name: {**given.get(name, {}), **sections.get(name, {})} for name in given.keys() | sections.keys()}
    config = tiny_config(**merged)
    model = dataclasses.replace(
        config.model,
        name=found.name,
        flavor=found.flavor,
        overrides=dict(found.overrides),
        hf_assets_path=str(folder(style)),
    )
    return dataclasses.replace(config, model=model)


def options(cls: Any, **more: Any) -> Any:
    """Arguments of a trainer of others that are those of ``config_for``."""
    given = {
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
    return cls(**{**given, **more})


def theirs(
    make: Callable[[Any, Any], Any], style: str = "llama3", cls: str = "AutoModelForCausalLM", **named: Any
) -> list[float]:
    """Losses of each step of the trainer that ``make`` gives for a model and a tokenizer, in a process of its own."""
    return run_ranks(1, _theirs, make, style, cls, named)[0]  # type: ignore[no-any-return]


def _theirs(_: int, make: Callable[[Any, Any], Any], style: str, cls: str, named: dict[str, Any]) -> list[float]:
    import torch
    import transformers

    torch.distributed.destroy_process_group()  # they would think that they are ranks of ours
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    model = getattr(transformers, cls).from_pretrained(folder(style), dtype=torch.float32, **named)
    trainer = make(model, transformers.AutoTokenizer.from_pretrained(folder(style)))
    # decay falls on all weights with us, and on norms and biases not with them
    parameters = [p for p in trainer.model.parameters() if p.requires_grad]
    trainer.optimizer = torch.optim.AdamW(
        parameters, SIZE["lr"], (SIZE["beta1"], SIZE["beta2"]), SIZE["eps"], SIZE["weight_decay"]
    )
    losses: list[float] = []
    step = trainer.training_step
    trainer.training_step = lambda *given, **named: _kept(losses, step(*given, **named))
    trainer.train()
    size = len(losses) // STEPS  # of micro-batches, each already divided by their number
    return [sum(losses[i * size : (i + 1) * size]) for i in range(STEPS)]


def _kept(losses: list[float], loss: Any) -> Any:
    losses.append(float(loss))
    return loss


def in_order(rows: list[dict[str, Any]], ended: Ended, columns: tuple[str, ...]) -> Any:
    """The rows as ours were read, as a dataset."""
    import datasets

    numbers = [number for step in ended.sample_ids for number in step]
    return datasets.Dataset.from_list([{key: rows[number][key] for key in columns} for number in numbers])


def assert_close(ended: Ended, losses: list[float]) -> None:
    """To 1e-4 in each of ten steps, of losses that change by much more."""
    assert ended.error is None, ended.error
    assert len(ended.losses) == len(losses) == STEPS
    assert max(abs(mine - other) for mine, other in zip(ended.losses, losses, strict=True)) <= 1e-4, (
        ended.losses,
        losses,
    )
    assert abs(losses[-1] - losses[0]) > 1e-2
