"""Losses of ten steps match trl on the same weights and rows, within 1e-4."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from against import BATCH, SEQ_LEN, assert_close, folder, in_order, options, ours, pairs, theirs
from hub_folders import build, save
from tiers import cases
from tiny import Ended

from shardtrain.config.schema import Config
from shardtrain.data.order import sample_at
from shardtrain.data.packing.fitted import best_fit

datasets = pytest.importorskip("datasets")
if importlib.util.find_spec("trl") is None:
    warnings.warn(
        "trl is not installed (the dev extra includes it): losses are not compared", stacklevel=1
    )
    pytest.skip("trl is not installed", allow_module_level=True)
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
# imported once here, instead of in each process
import trl  # noqa: E402
import trl.data_utils  # noqa: E402
from trl import DPOTrainer, KTOTrainer, RewardTrainer, SFTTrainer  # noqa: E402
from trl.experimental.cpo import CPOConfig, CPOTrainer  # noqa: E402
from trl.experimental.gkd import GKDTrainer  # noqa: E402
from trl.experimental.orpo import ORPOConfig, ORPOTrainer  # noqa: E402

BETA = 0.3
Both = tuple[Ended, list[float]]
"""A run of shardtrain, and the losses of trl."""


CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def dpo(model: Any, tokenizer: Any, data: Any) -> Any:
    args = options(trl.DPOConfig, beta=BETA, max_length=None)
    return DPOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)


def sft(model: Any, tokenizer: Any, data: Any, batch: int = BATCH) -> Any:
    args = options(
        trl.SFTConfig, max_length=None, per_device_train_batch_size=batch, completion_only_loss=True
    )
    return SFTTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)


def of_dpo() -> Both:
    rows = pairs()
    ended = ours(rows, task={"name": "preference", "beta": BETA})
    data = in_order(rows, ended, ("prompt", "chosen", "rejected"))
    return ended, theirs(lambda model, tokenizer: dpo(model, tokenizer, data))


def of_simpo() -> Both:
    rows = pairs()
    ended = ours(rows, task={"name": "simpo", "beta": 2.0, "gamma": 0.4})
    data = in_order(rows, ended, ("prompt", "chosen", "rejected"))

    def make(model: Any, tokenizer: Any) -> Any:
        args = options(
            CPOConfig,
            loss_type="simpo",
            cpo_alpha=0.0,
            beta=2.0,
            simpo_gamma=0.4,
            max_length=2 * SEQ_LEN,
        )
        return CPOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)

    return ended, theirs(make)


def of_orpo() -> Both:
    """trl averages over the tokens of a micro-batch, so micro-batches of one pair give pairs equal weight."""
    rows = pairs()
    ended = ours(rows, task={"name": "orpo", "beta": BETA})
    data = in_order(rows, ended, ("prompt", "chosen", "rejected"))

    def make(model: Any, tokenizer: Any) -> Any:
        sizes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": BATCH}
        args = options(ORPOConfig, beta=BETA, max_length=2 * SEQ_LEN, **sizes)
        return ORPOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)

    return ended, theirs(make)


def of_kto() -> Both:
    rows = pairs()
    options_of_task = {"name": "kto", "beta": BETA, "group_size": BATCH, "desirable_weight": 1.5}
    one_group_per_step = {"local_batch_size": 1, "global_batch_size": 1}
    ended = ours(rows, task=options_of_task, training=one_group_per_step)

    # TRL gets the rows in the order in which our run read its groups.
    order = [int(i) for i in sample_at(np.arange(len(rows)), len(rows), Config().debug.seed)]
    ordered_rows = []
    for step in ended.sample_ids:
        for group in step:
            for index in order[group * BATCH : (group + 1) * BATCH]:
                row = rows[index]
                ordered_rows.append({key: row[key] for key in ("prompt", "completion", "label")})
    data = datasets.Dataset.from_list(ordered_rows)

    def make(model: Any, tokenizer: Any) -> Any:
        args = options(trl.KTOConfig, beta=BETA, desirable_weight=1.5, max_length=None)
        return KTOTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)

    return ended, theirs(make)


def of_a_reward_model() -> Both:
    """TRL and shardtrain start with the same new head, which shardtrain draws. Rows have margins."""
    rows = [{**row, "margin": number % 4 / 2} for number, row in enumerate(pairs())]
    task = {"name": "reward_model"}
    head = ours(rows, task=task, training={"steps": 1}, optimizer={"lr": 1e-30}).weights[
        "head.weight"
    ]
    ended = ours(rows, task=task)
    data = in_order(rows, ended, ("prompt", "chosen", "rejected", "margin"))

    def make(model: Any, tokenizer: Any) -> Any:
        model.score.weight.data.copy_(head)
        model.config.pad_token_id = tokenizer.pad_token_id
        args = options(trl.RewardConfig, max_length=None, disable_dropout=True)
        return RewardTrainer(model, args=args, train_dataset=data, processing_class=tokenizer)

    return ended, theirs(make, cls="AutoModelForSequenceClassification", num_labels=1)


def of_completions(style: str) -> Both:
    rows = pairs()
    ended = ours(rows, style, data={"format": "prompt_completion", "packing": "padded"})
    data = in_order(rows, ended, ("prompt", "completion"))
    return ended, theirs(lambda model, tokenizer: sft(model, tokenizer, data), style)


def of_packed_rows() -> Both:
    """Every step reads all rows, so packing affects only attention and not the rows of a step."""
    rows = pairs()
    packing = {"format": "prompt_completion", "packing": "first_fit"}
    # A first run counts the packed rows of an epoch.
    packed_rows = set()
    for step in ours(rows, data=packing, training={"steps": 8}).sample_ids:
        packed_rows |= set(step)
    count = len(packed_rows)
    assert BATCH < count < len(rows)

    batch_size = {"local_batch_size": count, "global_batch_size": count}
    ended = ours(rows, data=packing, training=batch_size)
    for step in ended.sample_ids:
        assert len(set(step)) == count, "every step must have all rows once"

    texts = [{key: row[key] for key in ("prompt", "completion")} for row in rows]
    data = datasets.Dataset.from_list(texts * 10)
    return ended, theirs(lambda model, tokenizer: sft(model, tokenizer, data, len(rows)))


def of_conversations() -> Both:
    rows = [
        {
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "completion": [{"role": "assistant", "content": row["completion"].strip()}],
            "chat_template_kwargs": {"style": "you" if number % 2 else "today"},
        }
        for number, row in enumerate(pairs())
    ]
    ended = ours(
        rows, data={"format": "prompt_completion", "packing": "padded"}, training={"seq_len": 96}
    )
    data = in_order(rows, ended, ("prompt", "completion", "chat_template_kwargs"))
    return ended, theirs(lambda model, tokenizer: sft(model, tokenizer, data))


def of_chatml(name: str) -> Both:
    """Use a chat template that ends turns with a newline. TRL computes a loss for this newline too."""
    file = Path(tempfile.mkdtemp(prefix="shardtrain-tests-")) / "chatml.jinja"
    file.write_text(CHATML)
    roles = {"prompt": "user", **dict.fromkeys(("completion", "chosen", "rejected"), "assistant")}
    rows = []
    for row in pairs():
        rows.append(
            {key: [{"role": role, "content": row[key].strip()}] for key, role in roles.items()}
        )
    data = {"chat_template": str(file), "learn_turn_separator": True}
    if name == "sft":
        data |= {"format": "prompt_completion", "packing": "padded"}
        ended = ours(rows, data=data, training={"seq_len": 96})
        ordered_rows = in_order(rows, ended, ("prompt", "completion"))
    else:
        ended = ours(
            rows, data=data, training={"seq_len": 96}, task={"name": "preference", "beta": BETA}
        )
        ordered_rows = in_order(rows, ended, ("prompt", "chosen", "rejected"))

    def make(model: Any, tokenizer: Any) -> Any:
        tokenizer.chat_template = CHATML
        return {"sft": sft, "dpo": dpo}[name](model, tokenizer, ordered_rows)

    return ended, theirs(make)


@functools.cache
def teacher() -> Path:
    """Write a Llama with other weights and sizes, and the tokenizer of the student. Return its folder."""
    place = Path(tempfile.mkdtemp(prefix="shardtrain-tests-")) / "teacher"
    shutil.copytree(folder(), place, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    rows = json.loads((folder() / "config.json").read_text())["vocab_size"]
    return save(build("llama3-tied", seed=7, vocab_size=rows, hidden_size=48), place)


def of_distillation() -> Both:
    """Cross-entropy mixed with the divergence of trl's GKD. The factor T^2 is added here."""
    rows = pairs()
    place = teacher()
    task = {
        "teacher_path": str(place),
        "kd_ratio": 0.7,
        "temperature": 2.0,
        "divergence": "jsd",
        "jsd_beta": 0.3,
    }
    packing = {"format": "prompt_completion", "packing": "padded"}
    ended = ours(rows, task={"name": "distillation", **task}, data=packing)
    data = in_order(rows, ended, ("prompt", "completion"))

    def make(model: Any, tokenizer: Any) -> Any:
        import torch
        import transformers
        from torch.nn import functional as F

        teacher_model = transformers.AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32
        ).eval()

        class Distilled(SFTTrainer):
            def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
                labels = inputs["labels"][:, 1:]
                model_inputs = {key: inputs[key] for key in ("input_ids", "attention_mask")}
                student = model(**model_inputs).logits[:, :-1]
                with torch.no_grad():
                    teacher_logits = teacher_model(**model_inputs).logits[:, :-1]
                loss = F.cross_entropy(student.flatten(0, 1), labels.flatten())
                divergence = GKDTrainer.generalized_jsd_loss(
                    student, teacher_logits, labels, beta=0.3, temperature=2.0
                )
                return 0.3 * loss + 0.7 * 2.0**2 * divergence

        args = options(
            trl.SFTConfig,
            max_length=None,
            per_device_train_batch_size=BATCH,
            completion_only_loss=True,
        )
        return Distilled(model, args=args, train_dataset=data, processing_class=tokenizer)

    return ended, theirs(make)


CASES: dict[str, Callable[[], Both]] = {
    "dpo": of_dpo,
    "kto": of_kto,
    "completions without bos": lambda: of_completions("gpt2"),
    "completions with bos": lambda: of_completions("llama3"),
    "simpo": of_simpo,
    "orpo": of_orpo,
    "reward model": of_a_reward_model,
    "packed rows": of_packed_rows,
    "conversations": of_conversations,
    "sft on chatml": lambda: of_chatml("sft"),
    "dpo on chatml": lambda: of_chatml("dpo"),
    "distillation": of_distillation,
}


@pytest.mark.parametrize("case", cases(list(CASES)[:3], nightly=list(CASES)[3:]))
def test_ten_losses_match_trl(case: str) -> None:
    assert_close(*CASES[case]())


@pytest.mark.parametrize("seq_len", [64, 333])
def test_best_fit_fills_rows_as_bfd_of_trl(seq_len: int) -> None:
    lengths = np.random.default_rng(1).integers(1, seq_len + 1, 500)
    table = pyarrow.table({"input_ids": [list(range(length)) for length in lengths]})
    packed = trl.data_utils._pack_bfd(table, seq_len)
    lengths_of_trl = sorted(len(row) for row in packed["input_ids"].to_pylist())
    assert sorted(np.bincount(best_fit(lengths, seq_len), weights=lengths)) == lengths_of_trl
