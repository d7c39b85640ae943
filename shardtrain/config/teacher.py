"""The teacher of ``task.name = "distillation"``: the configuration of its model, and rules that need no torch."""

from __future__ import annotations

import dataclasses
import filecmp
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardtrain.config import derived
from shardtrain.config.assets import tokenizer_folder
from shardtrain.config.folder_model import NAME, with_folder
from shardtrain.config.load import Loaded
from shardtrain.config.rules.experts_rules import check_experts
from shardtrain.config.rules.model_rules import check_sizes, check_tensor_parallel, model_shape
from shardtrain.config.rules.pipeline_rules import check_context
from shardtrain.config.rules.task_rules import DISTILLATION
from shardtrain.config.rules.transformers_rules import check_transformers
from shardtrain.config.rules.values import problem
from shardtrain.config.schema import Config, Lora, Model
from shardtrain.config.schema.task_options import Task
from shardtrain.utils import bounded_reads, checked_json
from shardtrain.utils.errors import Problem

OPTION = "task.teacher_path"
_TOKENIZER = "tokenizer.json"
_OTHER_TOKENIZERS = ("tokenizer.model",)
_MAX_BYTES = 2**28


def teacher_config(config: Config) -> Config | Problem:
    """The run's configuration with the teacher's model in place of its own: whole, frozen and without adapters."""
    path = config.task.teacher_path
    if not path:
        return Problem(
            OPTION, path, "must name the teacher's Hugging Face folder", 'give the path, as "./assets/hf/..."'
        )
    if not (Path(path) / "config.json").is_file():
        fix = "name a Hugging Face folder; shardtrain export makes one of a run, shardtrain data download fetches one"
        return Problem(OPTION, path, "has no config.json", fix)
    alone = dataclasses.replace(config, model=Model(hf_assets_path=path), task=Task(), lora=Lora())
    found = with_folder(alone, {"model.hf_assets_path": OPTION})
    if isinstance(found, Problem):
        return dataclasses.replace(found, option=OPTION, value=path)

    # Its own model on the student's mesh, without what is about training it
    experts = (model_shape(Loaded(found.config)) or {}).get("num_experts")
    degree = config.parallelism.expert_parallel_degree if experts else 1
    parallelism = dataclasses.replace(config.parallelism, shard_optimizer_states=False, expert_parallel_degree=degree)
    debug = dataclasses.replace(config.debug, moe_force_load_balance=False)
    # What is never updated needs no digits beyond those that it computes with: the numbers are the same
    low = derived.compute_dtype(config) == "bfloat16"
    training = dataclasses.replace(config.training, dtype="bfloat16") if low else config.training
    recompute = dataclasses.replace(config.activation_checkpoint, mode="none")
    return dataclasses.replace(
        found.config, parallelism=parallelism, activation_checkpoint=recompute, debug=debug, training=training
    )


def check_distillation(loaded: Loaded) -> Iterator[Problem]:
    """The teacher is there, fits the mesh and has the student's vocabulary; the mix can be computed."""
    task = loaded.config.task
    if task.name != DISTILLATION:
        return
    if task.options:
        yield problem(loaded, "task.options", "is for a task file of yours", "remove it")
    if not 0 < task.kd_ratio <= 1:
        rule = "must be above 0 and at most 1: the teacher's share of the loss"
        yield problem(loaded, "task.kd_ratio", rule, 'use 0.5, or task.name = "language_model" without a teacher')
    if not 0 < task.temperature < float("inf"):
        yield problem(loaded, "task.temperature", "must be above 0", "use 1.0")
    if task.divergence == "jsd" and not 0 < task.jsd_beta < 1:
        rule = "must lie between 0 and 1, whose ends are the two KL divergences"
        yield problem(loaded, "task.jsd_beta", rule, 'use 0.5, or task.divergence = "forward_kl" or "reverse_kl"')
    if task.divergence != "jsd" and task.jsd_beta != Task().jsd_beta:
        rule = f'has no effect with task.divergence = "{task.divergence}"'
        yield problem(loaded, "task.jsd_beta", rule, 'set task.divergence = "jsd", or remove it')
    found = teacher_config(loaded.config)
    if isinstance(found, Problem):
        yield dataclasses.replace(found, where=loaded.where(OPTION))
        return

    # The teacher has to fit the mesh as the student does; a problem of its sizes is one of the folder that has them
    teacher = Loaded(found)
    for check in (check_sizes, check_tensor_parallel, check_experts, check_context, check_transformers):
        for broken in check(teacher):
            of_mesh = broken.option.startswith("parallelism.")
            rule = f"{broken.rule}, the teacher of {OPTION}" if of_mesh else f"{broken.option}: {broken.rule}"
            option, value = (broken.option, broken.value) if of_mesh else (OPTION, task.teacher_path)
            yield Problem(option, value, rule, broken.fix, loaded.where(option))

    # Both have the same tokens under the same ids. They may have different numbers of rows, of which the last ones are
    # no token's, unless ranks hold parts of them
    c = loaded.config
    path = task.teacher_path
    where = loaded.where(OPTION)
    rows = _rows(loaded)
    teacher_rows = _rows(teacher)
    split = c.parallelism.tensor_parallel_degree > 1 and not c.parallelism.disable_loss_parallel
    if split and rows and teacher_rows and rows != teacher_rows:
        rule = f"has {teacher_rows} rows of its vocabulary and the model {rows}, which ranks would not split alike"
        yield Problem(OPTION, path, rule, "set parallelism.disable_loss_parallel = true", where)
    tokenizer = c.model.tokenizer_path or c.model.hf_assets_path
    difference = _difference(tokenizer, path)
    if difference:
        rule = f"has another vocabulary than {tokenizer}: {difference}"
        yield Problem(OPTION, path, rule, "use a teacher with the model's own tokenizer", where)


def _rows(loaded: Loaded) -> int | None:
    found = (model_shape(loaded) or {}).get("vocab_size")
    if found is None and loaded.config.model.name == NAME:  # those of its folder, unless they are set
        try:
            file = Path(str(loaded.config.model.overrides["path"])) / "config.json"
            found = checked_json.parse(bounded_reads.whole(file, _MAX_BYTES)).get("vocab_size")
        except (OSError, ValueError, KeyError, AttributeError):
            found = None
    return found if isinstance(found, int) else None


def _difference(own: str, teacher: str) -> str:
    """Where a token of ours is another one, or none, in the teacher's tokenizer; "" where each is the same.

    Of two files of different kinds, and of a teacher without a tokenizer, nothing is known here.
    """
    ours, theirs = (_file(path, _TOKENIZER) for path in (own, teacher))
    if ours is not None and theirs is not None:
        if filecmp.cmp(ours, theirs, shallow=False):
            return ""
        our_words = _words(ours)
        their_words = _words(theirs)
        if our_words is None or their_words is None:
            return ""  # what is wrong with the file is reported where it is opened
        for id_, word in our_words.items():
            if their_words.get(id_) != word:
                there = repr(their_words[id_]) if id_ in their_words else "nothing"
                return f"id {id_} is {word!r} here and {there} there"
        return ""
    for name in _OTHER_TOKENIZERS:
        ours = _file(own, name)
        theirs = _file(teacher, name)
        if ours is not None and theirs is not None:
            return "" if filecmp.cmp(ours, theirs, shallow=False) else f"{name} is another file"
    if own == "bytes" and any(_file(teacher, name) for name in (_TOKENIZER, *_OTHER_TOKENIZERS)):
        return "ids are bytes here, and there is a tokenizer there"
    return ""


def _file(path: str, name: str) -> Path | None:
    found = tokenizer_folder(path)
    found = found / name if found.is_dir() else found
    return found if found.name == name and found.is_file() and found.stat().st_size <= _MAX_BYTES else None


def _words(file: Path) -> dict[int, str] | None:
    """The tokens of a tokenizer.json by their ids, in the order of ids; None where it cannot be read."""
    try:
        found: Mapping[str, Any] = json.loads(bounded_reads.whole(file, _MAX_BYTES))
        vocab = found["model"]["vocab"]
        if isinstance(vocab, dict):
            words = {id_: word for word, id_ in vocab.items()}
        else:  # unigram: pairs of a token and its score
            words = {id_: pair[0] for id_, pair in enumerate(vocab)}
        for added in found.get("added_tokens") or []:
            words[added["id"]] = added["content"]
        return dict(sorted(words.items()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None
