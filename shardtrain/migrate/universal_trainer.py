"""pytorch_universal_trainer: ``parameters.yml``, which trains a classifier on TSV files without a header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain.migrate.report import JOINED, Cannot, Found, Idle, Rule, To

SYSTEM = "pytorch_universal_trainer"
OPEN = "a key of yours: a task file of yours (task.name = its path) reads it from task.options"
LEAVES: frozenset[str] = frozenset()
MAX_COUNTED_BYTES = 2**31
_T, _D, _N = "transformers-params.", "data-params.", "dist-params."


def looks(values: Mapping[str, Any]) -> bool:
    """Whether this is such a file."""
    return "transformers-params" in values or {"data-params", "dist-params"} <= values.keys()


def _home(path: str) -> str:
    return str(Path(path).expanduser())


KEYS: Mapping[str, Rule] = {
    f"{_D}data_dir": JOINED,
    f"{_D}is_dev_file": JOINED,
    f"{_T}mode": JOINED,
    f"{_T}continue_training": Cannot(
        "a run continues by itself from its own folder; weights of a checkpoint-N file come in by `shardtrain import`"
    ),
    f"{_T}continue_training_path": Idle("it is read with continue_training alone"),
    f"{_T}pretrained_model_dir": JOINED,
    f"{_T}model_dir": To("job.dump_folder", str, _home),
    f"{_T}is_distributed": JOINED,
    f"{_T}use_native_fp16": To(
        "training.mixed_precision_param", bool, lambda on: "float16" if on else "float32", "with a loss scale"
    ),
    f"{_T}use_fairscale_optimizer_sharding": JOINED,
    f"{_T}use_fairscale_model_sharding": JOINED,
    f"{_T}use_fairscale_autowrap": JOINED,
    f"{_T}use_fairscale_reshard_forward": JOINED,
    f"{_T}num_loader_workers": To("training.dataloader.num_workers", int),
    f"{_T}batch_size": JOINED,
    f"{_T}use_max_length": JOINED,
    f"{_T}max_length": JOINED,
    f"{_T}num_epochs": To("training.epochs", int),
    f"{_T}gradient_accumulation_steps": JOINED,
    f"{_T}log_steps_ratio": JOINED,
    f"{_T}save_steps_ratio": JOINED,
    f"{_T}learning_rate": To("optimizer.lr", float),
    f"{_T}warmup_proportion": To("lr_scheduler.warmup_proportion", float),
    f"{_T}num_labels": To("task.num_labels", int),
    f"{_N}nodes": JOINED,
    f"{_N}gpus": JOINED,
    f"{_N}current_node": JOINED,
    f"{_N}master_addr": JOINED,
    f"{_N}master_port": JOINED,
}


def _key(section: str, name: str) -> str:
    return f"{section[:-1]}\0{name}"


def finish(found: Found) -> None:
    """Join what several keys say, and set what the program itself fixed."""
    get = found.get
    world = _processes(found)
    _data(found)
    mode = str(get(_key(_T, "mode"), str, "train"))
    text = "`shardtrain train` trains" if mode == "train" else "`shardtrain test` of the TOML tests the best checkpoint"
    found.answer(_key(_T, "mode"), "honoured" if mode == "train" else "unsupported", text)
    folder = get(_key(_T, "pretrained_model_dir"), str)
    if folder:
        found.set(_key(_T, "pretrained_model_dir"), "model.hf_assets_path", _home(folder))
        found.default("model.flavor", "from_folder", "the folder says which model it holds")
        found.default("checkpoint.initial_load_in_hf", True, "training begins with the folder's weights")
        if _facts(folder).get("model_type") == "bart":
            labels = get(_key(_T, "num_labels"), int, 2)
            found.default("model.name", "transformers", "BART is taken as transformers has it")
            found.default("model.overrides.num_labels", labels, "a BART that does not say has 3")
    found.answer(_key(_T, "pretrained_model_dir"), "ignored", "it is empty")
    found.default("task.name", "classification")
    _batch(found, world)
    _sharding(found, world)
    cut = get(_key(_T, "use_max_length"), bool, False)
    limit = get(_key(_T, "max_length"), int, 200)
    if cut:
        found.set(_key(_T, "max_length"), "training.seq_len", limit)
        found.answer(_key(_T, "use_max_length"), "honoured", f"longer rows lose their end after {limit} tokens")
    else:
        most = _positions(folder)
        found.default("training.seq_len", most, "rows are not cut (use_max_length) below what the model can see")
        found.answer(
            _key(_T, "use_max_length"), "honoured", f"rows keep up to {most} tokens; a batch is as wide as its longest"
        )
        found.answer(_key(_T, "max_length"), "ignored", "it is read with use_max_length alone")
    found.default("checkpoint.enable", True)
    for option, value in (
        ("optimizer.beta2", 0.999),
        ("optimizer.weight_decay", 0.01),
        ("optimizer.no_weight_decay", ["*.bias", "*norm*"]),
        ("lr_scheduler.name", "linear_by_proportion"),
    ):
        found.default(option, value)
    if get(_key(_D, "is_dev_file"), bool, True):
        found.default("validation.seq_len", next(s.value for s in found.settings if s.option == "training.seq_len"))


def _processes(found: Found) -> int:
    nodes, gpus = found.get(_key(_N, "nodes"), int, 1), found.get(_key(_N, "gpus"), int, 1)
    distributed = found.get(_key(_T, "is_distributed"), bool, True)
    if distributed:
        found.set(_key(_N, "nodes"), "launch.nodes", nodes)
        found.set(_key(_N, "gpus"), "launch.nproc_per_node", gpus)
        found.answer(_key(_T, "is_distributed"), "honoured", "a process per device")
    else:
        text = "all local devices share the batch, as DataParallel did, each as a process of its own"
        found.answer(_key(_T, "is_distributed"), "honoured", text)
        for name in ("nodes", "gpus"):
            found.answer(_key(_N, name), "ignored", "it is read with is_distributed alone")
    way = (
        "train --nnodes N --node_rank K --rdzv_endpoint HOST:PORT says so" if nodes > 1 else "one node needs none of it"
    )
    for name in ("current_node", "master_addr", "master_port"):
        found.answer(_key(_N, name), "ignored", f"where a node is belongs to its command line: {way}")
    return found.num_processes or (nodes * gpus if distributed else 1)


def _batch(found: Found, world: int) -> None:
    batch = found.get(_key(_T, "batch_size"), int, 8)
    accumulated = found.get(_key(_T, "gradient_accumulation_steps"), int, 1)
    if found.get(_key(_T, "is_distributed"), bool, True):
        found.set(_key(_T, "batch_size"), "training.local_batch_size", batch, "rows of each process")
        total = batch * accumulated * world
    else:
        rows = max(1, batch // max(1, accumulated) // world)
        found.set(
            _key(_T, "batch_size"), "training.local_batch_size", rows, "the batch was that of all devices together"
        )
        total = rows * accumulated * world
    if accumulated > 1 or not found.get(_key(_T, "is_distributed"), bool, True):
        key = _key(_T, "gradient_accumulation_steps")
        found.set(key, "training.global_batch_size", total, f"rows of a step of {world} processes")
    found.answer(_key(_T, "gradient_accumulation_steps"), "honoured", "nothing is accumulated")
    rows = next(s.value for s in found.settings if s.option == "training.local_batch_size")
    found.default("validation.local_batch_size", rows)


def _sharding(found: Found, world: int) -> None:
    names = ("optimizer_sharding", "model_sharding", "autowrap", "reshard_forward")
    optimizer, model, wrap, reshard = (found.get(_key(_T, f"use_fairscale_{name}"), bool, False) for name in names)
    place = {name: _key(_T, f"use_fairscale_{name}") for name in names}
    if model:
        found.set(place["model_sharding"], "parallelism.data_parallel_shard_degree", -1)
        value = "always" if reshard else "never"
        found.set(place["reshard_forward"], "parallelism.fsdp_reshard_after_forward", value)
        text = (
            "each block is sharded by itself"
            if wrap
            else "blocks are sharded one by one all the same, which takes less memory"
        )
        found.answer(place["autowrap"], "honoured", text)
    elif world > 1:
        found.default("parallelism.data_parallel_replicate_degree", world, "each process held the whole model")
        found.default("parallelism.data_parallel_shard_degree", 1, "each process held the whole model")
        if optimizer:
            found.set(place["optimizer_sharding"], "parallelism.shard_optimizer_states", True)
    for name in names:
        found.answer(
            place[name],
            "ignored",
            "nothing is sharded by it" if world > 1 or model else "one process has nothing to shard",
        )


def _data(found: Found) -> None:
    folder = found.get(_key(_D, "data_dir"), str)
    if not folder:
        found.answer(_key(_D, "data_dir"), "ignored", "it is empty")
        found.answer(_key(_D, "is_dev_file"), "ignored", "there is no data_dir")
        return
    base = Path(folder).expanduser()
    found.set(_key(_D, "data_dir"), "training.dataset_path", str(_file(base, "train")), "sentence<TAB>label, no header")
    found.default("training.dataset", "tsv")
    found.default("data.text_field", "0", "the first column")
    found.default("task.label_field", "1", "the second column")
    found.default("task.test_dataset_path", str(_file(base, "test")))
    found.default("validation.dataset", "tsv")
    found.default("validation.dataset_path", str(_file(base, "dev")))
    key = _key(_D, "is_dev_file")
    if found.get(key, bool, True):
        found.set(key, "validation.enable", True)
        found.default("validation.per_epoch", 1)
        found.default("checkpoint.keep_best", "validation.accuracy", "the best step was to be typed by hand")
    else:
        found.set(key, "validation.enable", False)
    _per_epoch(found, base)


def _per_epoch(found: Found, base: Path) -> None:
    """Turn lines and saves per epoch into steps, where the data are here to be counted."""
    rows = _rows(_file(base, "train"))
    batch = found.get(_key(_T, "batch_size"), int, 8) * found.get(_key(_T, "gradient_accumulation_steps"), int, 1)
    steps = rows // max(1, batch * max(1, _world(found))) if rows else 0
    for name, option in (("log_steps_ratio", "metrics.log_freq"), ("save_steps_ratio", "checkpoint.interval")):
        ratio = found.get(_key(_T, name), int, 1)
        if steps and ratio > 0:
            found.set(_key(_T, name), option, max(1, steps // ratio), f"{ratio} in an epoch of {steps} steps")
        else:
            text = f"the data are not here to be counted; set {option}, in steps"
            found.answer(_key(_T, name), "ignored", text)


def _world(found: Found) -> int:
    given = [s.value for s in found.settings if s.option in ("launch.nodes", "launch.nproc_per_node")]
    return found.num_processes or (given[0] * given[1] if len(given) == 2 else 1)


def _file(base: Path, part: str) -> Path:
    """The file of one part: of the names that the program's users have, the one that is there."""
    names = [f"sentiment-{part}", f"sentiment-{part}.tsv", f"{part}.tsv"]
    return next((base / name for name in names if (base / name).is_file()), base / names[0])


def _rows(file: Path) -> int:
    try:
        if file.stat().st_size > MAX_COUNTED_BYTES:
            return 0
        with file.open("rb") as opened:
            return sum(block.count(b"\n") for block in iter(lambda: opened.read(2**20), b""))
    except OSError:
        return 0


def _positions(folder: str | None) -> int:
    """Tokens that the model of a folder can see, 1024 (BART's) where the folder does not say."""
    most = _facts(folder).get("max_position_embeddings")
    return most if isinstance(most, int) and not isinstance(most, bool) and 0 < most <= 8192 else 1024


def _facts(folder: str | None) -> dict[str, Any]:
    """What config.json of a folder says; the program's own model is a BART, where there is no folder yet."""
    try:
        facts = json.loads((Path(folder or "").expanduser() / "config.json").read_bytes()[: 2**20])
    except (OSError, ValueError, RecursionError):
        return {"model_type": "bart"}
    return facts if isinstance(facts, dict) else {}
