"""Frozen models in a separate folder: the teacher of distillation, and the reference model of
``task.reference_path``. Their configuration and their rules. No torch is imported.
"""

from __future__ import annotations

import dataclasses
import filecmp
import math
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
from shardtrain.config.rules.task_rules import DISTILLATION, WITH_REFERENCE
from shardtrain.config.rules.transformers_rules import check_transformers
from shardtrain.config.rules.values import problem
from shardtrain.config.schema import Config, Lora, Model
from shardtrain.config.schema.task_options import Task
from shardtrain.utils import bounded_reads, checked_json
from shardtrain.utils.errors import Problem

TEACHER = "task.teacher_path"
REFERENCE = "task.reference_path"
_NAMES = {TEACHER: "teacher", REFERENCE: "reference model"}
_TOKENIZER = "tokenizer.json"
_OTHER_TOKENIZERS = ("tokenizer.model",)
_MAX_BYTES = 2**28


def frozen_config(config: Config, option: str) -> Config | Problem:
    """Return the run's configuration with the model in the folder of an option, on the same mesh and without
    adapters.

    Return a Problem if the folder cannot be used.
    """
    path = _folder(config, option)
    if not path:
        return Problem(
            option,
            path,
            rule=f"must name the Hugging Face folder of the {_NAMES[option]}",
            fix='set the path, such as "./assets/hf/..."',
        )
    if not bounded_reads.is_present(Path(path) / "config.json"):
        return Problem(
            option,
            path,
            rule="has no config.json",
            fix="name a Hugging Face folder (from shardtrain export or shardtrain data download)",
        )
    # Describe the folder like the model of a run that names only this folder.
    without_student = dataclasses.replace(
        config, model=Model(hf_assets_path=path), task=Task(), lora=Lora()
    )
    folder = with_folder(without_student, {"model.hf_assets_path": option})
    if isinstance(folder, Problem):
        return dataclasses.replace(folder, option=option, value=path)

    # The frozen model uses the mesh of the run, without options of training.
    # A model without experts cannot divide them.
    num_experts = (model_shape(Loaded(folder.config)) or {}).get("num_experts")
    degree = config.parallelism.expert_parallel_degree if num_experts else 1
    parallelism = dataclasses.replace(
        config.parallelism,
        shard_optimizer_states=False,
        expert_parallel_degree=degree,
    )
    debug = dataclasses.replace(config.debug, moe_force_load_balance=False)
    recompute = dataclasses.replace(config.activation_checkpoint, mode="none")
    training = config.training
    # Frozen weights are stored in the compute dtype, which does not change results.
    if derived.compute_dtype(config) == "bfloat16":
        training = dataclasses.replace(training, dtype="bfloat16")
    return dataclasses.replace(
        folder.config,
        parallelism=parallelism,
        activation_checkpoint=recompute,
        debug=debug,
        training=training,
    )


def _folder(config: Config, option: str) -> str:
    return config.task.teacher_path if option == TEACHER else config.task.reference_path


def check_frozen_models(loaded: Loaded) -> Iterator[Problem]:
    """Yield problems of the divergence, and of a teacher or reference model: its folder, its sizes and its
    vocabulary.
    """
    option = _option_in_use(loaded.config)
    if not option:
        return
    if option == TEACHER:
        yield from divergence_options(loaded)
    config = frozen_config(loaded.config, option)
    if isinstance(config, Problem):
        yield dataclasses.replace(config, where=loaded.where(option))
        return
    frozen = Loaded(config)
    yield from check_sizes_and_mesh(loaded, frozen, option)
    yield from check_vocabulary(loaded, frozen, option)


def divergence_options(loaded: Loaded) -> Iterator[Problem]:
    """The constants of the divergence are in range."""
    task = loaded.config.task
    if task.options:
        yield problem(loaded, "task.options", "is for a task file of yours", "remove it")
    if not 0 < task.kd_ratio <= 1:
        yield problem(
            loaded,
            "task.kd_ratio",
            rule="must be above 0 and at most 1: the teacher's share of the loss",
            fix='use 0.5, or task.name = "language_model" without a teacher',
        )
    if not 0 < task.temperature < math.inf:
        yield problem(loaded, "task.temperature", "must be above 0", "use 1.0")
    if task.divergence == "jsd" and not 0 < task.jsd_beta < 1:
        yield problem(
            loaded,
            "task.jsd_beta",
            rule="must be between 0 and 1, where the two KL divergences are the limits",
            fix='use 0.5, or task.divergence = "forward_kl" or "reverse_kl"',
        )
    if task.divergence != "jsd" and task.jsd_beta != Task().jsd_beta:
        yield problem(
            loaded,
            "task.jsd_beta",
            rule=f'has no effect with task.divergence = "{task.divergence}"',
            fix='set task.divergence = "jsd", or remove it',
        )


def check_sizes_and_mesh(loaded: Loaded, frozen: Loaded, option: str) -> Iterator[Problem]:
    """The mesh divides the sizes of a frozen model. Problems of the sizes themselves name its folder."""
    # The user can change the mesh, but not the sizes in the folder.
    for check in (
        check_sizes,
        check_tensor_parallel,
        check_experts,
        check_context,
        check_transformers,
    ):
        for inner in check(frozen):
            if inner.option.startswith("parallelism."):
                rule = f"{inner.rule}, the {_NAMES[option]} of {option}"
                where = loaded.where(inner.option)
                yield Problem(inner.option, inner.value, rule, inner.fix, where)
            else:
                rule = f"{inner.option}: {inner.rule}"
                folder = _folder(loaded.config, option)
                yield Problem(option, folder, rule, inner.fix, loaded.where(option))


def check_vocabulary(loaded: Loaded, frozen: Loaded, option: str) -> Iterator[Problem]:
    """A frozen model and the trained model have the same tokens with the same ids.

    The numbers of rows may differ, because the last rows may be unused. With logits that are split
    over ranks they must be equal.
    """
    c = loaded.config
    path = _folder(c, option)
    where = loaded.where(option)
    rows = _num_rows(loaded)
    frozen_rows = _num_rows(frozen)
    has_split_logits = (
        c.parallelism.tensor_parallel_degree > 1 and not c.parallelism.disable_loss_parallel
    )
    if has_split_logits and rows and frozen_rows and rows != frozen_rows:
        yield Problem(
            option,
            path,
            rule=(
                f"has {frozen_rows} rows of its vocabulary and the model {rows}, which ranks would split differently"
            ),
            fix="set parallelism.disable_loss_parallel = true",
            where=where,
        )
    tokenizer = c.model.tokenizer_path or c.model.hf_assets_path
    difference = _difference(tokenizer, path)
    if difference:
        yield Problem(
            option,
            path,
            rule=f"has another vocabulary than {tokenizer}: {difference}",
            fix=f"use a {_NAMES[option]} with the model's own tokenizer",
            where=where,
        )


def check_ids(config: Config, num_ids: int) -> Iterator[Problem]:
    """Yield a problem for the model, and for its teacher or reference model, if it has fewer embedding rows
    than the tokenizer has ids.

    Models of unknown size are not compared.
    """
    rows = _num_rows(Loaded(config))
    if rows and num_ids > rows:
        yield Problem(
            "model.tokenizer_path" if config.model.tokenizer_path else "model.hf_assets_path",
            config.model.tokenizer_path or config.model.hf_assets_path,
            rule=f"contains a tokenizer with {num_ids} ids, and the model has a vocabulary of {rows}",
            fix="use the model's own tokenizer, or set model.overrides.vocab_size",
        )
    option = _option_in_use(config)
    frozen = frozen_config(config, option) if option else None
    if not isinstance(frozen, Config):
        return
    frozen_rows = _num_rows(Loaded(frozen))
    if frozen_rows and num_ids > frozen_rows:
        yield Problem(
            option,
            _folder(config, option),
            rule=f"has rows for {frozen_rows} ids, and the tokenizer {num_ids}",
            fix=f"use a {_NAMES[option]} with the model's own tokenizer",
        )


def _option_in_use(config: Config) -> str:
    """Return the option that names the frozen model of this run's task, or an empty string."""
    if config.task.name == DISTILLATION:
        return TEACHER
    if config.task.name in WITH_REFERENCE and config.task.reference_path:
        return REFERENCE
    return ""


def has_comparable_tokenizer(config: Config, path: str) -> bool:
    """True if the folder of a frozen model has a tokenizer file of the same kind as the model's own."""
    tokenizer = config.model.tokenizer_path or config.model.hf_assets_path
    names = (_TOKENIZER, *_OTHER_TOKENIZERS)
    return any(
        _file(tokenizer, name) is not None and _file(path, name) is not None for name in names
    )


def _num_rows(loaded: Loaded) -> int | None:
    """Return the rows of a model's embedding, or None if unknown."""
    num_rows = (model_shape(loaded) or {}).get("vocab_size")
    if num_rows is None and loaded.config.model.name == NAME:
        # A transformers model has the number in its config.json, unless an override sets it.
        try:
            file = Path(str(loaded.config.model.overrides["path"])) / "config.json"
            num_rows = checked_json.parse(bounded_reads.read_all(file, _MAX_BYTES)).get(
                "vocab_size"
            )
        except (OSError, ValueError, KeyError, AttributeError):
            return None
    return num_rows if isinstance(num_rows, int) else None


def _difference(student: str, teacher: str) -> str:
    """Describe the first token of the student's tokenizer with another id, or no id, in the teacher's.

    Return an empty string if there is no difference, or if the files are of different kinds and
    cannot be compared.
    """
    # Token by token only in a format that lists the tokens. Files of other formats are the same or not.
    student_file = _file(student, _TOKENIZER)
    teacher_file = _file(teacher, _TOKENIZER)
    if student_file is not None and teacher_file is not None:
        return _token_difference(student_file, teacher_file)
    for name in _OTHER_TOKENIZERS:
        student_file = _file(student, name)
        teacher_file = _file(teacher, name)
        if student_file is not None and teacher_file is not None:
            is_same = filecmp.cmp(student_file, teacher_file, shallow=False)
            return "" if is_same else f"{name} is another file"
    if student == "bytes" and any(
        _file(teacher, name) for name in (_TOKENIZER, *_OTHER_TOKENIZERS)
    ):
        return "ids are bytes in this run, and the other model has a tokenizer"
    return ""


def _token_difference(student_file: Path, teacher_file: Path) -> str:
    if filecmp.cmp(student_file, teacher_file, shallow=False):
        return ""
    student_tokens = _tokens(student_file)
    teacher_tokens = _tokens(teacher_file)
    # A file that cannot be read is reported when the tokenizer is opened.
    if student_tokens is None or teacher_tokens is None:
        return ""
    for id_, token in student_tokens.items():
        if teacher_tokens.get(id_) != token:
            other_text = "nothing"
            if id_ in teacher_tokens:
                other_text = repr(teacher_tokens[id_])
            return f"id {id_} is {token!r} here and {other_text} there"
    return ""


def _file(path: str, name: str) -> Path | None:
    """Return the file of this name at a tokenizer's path, or None if it does not exist or is too large."""
    file = tokenizer_folder(path)
    if file.is_dir():
        file = file / name
    is_usable = file.name == name and file.is_file() and file.stat().st_size <= _MAX_BYTES
    return file if is_usable else None


def _tokens(file: Path) -> dict[int, str] | None:
    """Return the tokens of a tokenizer.json by ascending id, or None if it cannot be read."""
    try:
        content: Mapping[str, Any] = checked_json.parse(
            bounded_reads.read_all(file, _MAX_BYTES), memory_bytes=checked_json.LARGE_MEMORY_BYTES
        )
        vocab = content["model"]["vocab"]
        if isinstance(vocab, dict):
            tokens = {id_: token for token, id_ in vocab.items()}
        else:
            # Unigram models have a list of pairs of token and score.
            tokens = {id_: pair[0] for id_, pair in enumerate(vocab)}
        for added in content.get("added_tokens") or []:
            tokens[added["id"]] = added["content"]
        return dict(sorted(tokens.items()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None
