"""pytorch_universal_trainer: ``parameters.yml``, which trains a classifier on TSV files without a header."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain.compat.migrate.document import facts_of_folder
from shardtrain.compat.migrate.migration_report import JOINED, FileMigration, Rule, To
from shardtrain.config.task_file import read_task_file
from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem

SYSTEM = "pytorch_universal_trainer"
OPEN = "nothing here reads it: a file of hooks does, which hooks_file names, as self.config.task.options"
LEAVES: frozenset[str] = frozenset()
MAX_COUNTED_BYTES = 2**31
_T = "transformers-params."
_D = "data-params."
_N = "dist-params."


def looks(values: Mapping[str, Any]) -> bool:
    """True if the keys are those of this system."""
    return "transformers-params" in values or {"data-params", "dist-params"} <= values.keys()


def _home(path: str) -> str:
    return str(Path(path).expanduser())


KEYS: Mapping[str, Rule] = {
    f"{_D}data_dir": JOINED,
    f"{_D}is_dev_file": JOINED,
    f"{_T}mode": JOINED,
    f"{_T}continue_training": JOINED,
    f"{_T}continue_training_path": JOINED,
    f"{_T}hooks_file": JOINED,
    f"{_T}pretrained_model_dir": JOINED,
    f"{_T}model_dir": To("job.dump_folder", str, _home),
    f"{_T}is_distributed": JOINED,
    f"{_T}use_native_fp16": To("training.mixed_precision_param", bool, lambda on: "float16" if on else "float32"),
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


def prepare(found: FileMigration) -> None:
    """Translate a user's own keys, which only hooks read. No rule can know them."""
    hooks = found.get(_key(_T, "hooks_file"), str)
    own = [key for key in found.values if key.replace("\0", ".") not in KEYS]
    if not hooks:
        return
    for key in own:
        section, _, name = key.rpartition("\0")
        if section not in (_T[:-1], _D[:-1], _N[:-1]):
            continue  # the rules refuse it, with what it may have meant
        value = found.values[key]
        if value is not None and not isinstance(value, int | float | bool | str):
            rule = "must be a number, a text or true or false, for a hook to read"
            fix = "write it as text"
            found.problems.append(Problem(key.replace("\0", "."), None, rule, fix, found.where(key)))
        elif value is not None:
            found.set(key, f"task.options.{name}", value, "hooks read it as self.config.task.options")
        else:
            found.answer(key, "ignored", "it is empty")


def finish(found: FileMigration) -> None:
    """Translate keys that depend on each other, and set options that the program hard-coded."""
    get = found.get
    world = _processes(found)
    task = _hooks(found)
    rows = _batch(found, world)
    _data(found, world * rows)
    mode = str(get(_key(_T, "mode"), str, "train"))
    if mode not in ("train", "test"):
        where = found.where(_key(_T, "mode"))
        fix = "correct it; a test file without labels gets predictions alone"
        found.problems.append(Problem(f"{_T}mode", mode, "must be train or test", fix, where))
    found.verb = mode
    found.answer(_key(_T, "mode"), "honoured", f"shardtrain.compat.main runs `shardtrain {mode}` of this file")
    folder = get(_key(_T, "pretrained_model_dir"), str)
    network = not any(setting.option == "model.name" for setting in found.settings)
    if folder and network:
        found.set(_key(_T, "pretrained_model_dir"), "model.hf_assets_path", _home(folder))
        found.default("model.flavor", "from_folder", "the folder says which model it holds")
        found.default("checkpoint.initial_load_in_hf", True, "training begins with the folder's weights")
        base = Path(_home(folder))
        if (base / "pytorch_model.bin").is_file() and not any(base.glob("model*.safetensors*")):
            found.default("checkpoint.initial_load_legacy_bin", True, "it has pytorch_model.bin, which is read as data")
        architecture = _CLASSIFIERS.get(str(_facts(folder).get("model_type")))
        if architecture:
            labels = get(_key(_T, "num_labels"), int, 2)
            found.default("model.name", "transformers", f"{architecture} is taken as transformers has it")
            if architecture not in (_facts(folder).get("architectures") or [architecture]):
                found.default("model.overrides.architecture", architecture, "the body of the folder under a new head")
            found.default("model.overrides.num_labels", labels, "its config.json may say another number")
            found.default("model.overrides.dropout", True, "at the rates of config.json")
    elif folder:
        found.set(_key(_T, "pretrained_model_dir"), "model.hf_assets_path", _home(folder), "for its tokenizer")
    found.answer(_key(_T, "pretrained_model_dir"), "ignored", "it is empty")
    if network and not folder:
        found.default("model.name", "encoder", "no folder names a model: one of this package, from scratch, on bytes")
        found.default("model.flavor", "small")
    found.default("task.name", "classification")
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
    for option, value in (
        ("checkpoint.enable", True),
        ("checkpoint.keep_latest_k", 0),
        ("optimizer.beta2", 0.999),
        ("optimizer.weight_decay", 0.01),
        ("lr_scheduler.name", "linear_by_proportion"),
        ("metrics.enable_tensorboard", True),
        ("metrics.save_tb_folder", "tensorboard_logs"),
        ("metrics.save_log_file", "logger_logs/training_{rank}.log"),
    ):
        found.default(option, value)

    # The program excludes these names from weight decay. BART's norms are called layer_norm and
    # layernorm_embedding and match none of them, so they decay as in the program. Each pattern must
    # match a parameter.
    patterns = ["*bias*"]
    if network:
        kind = _facts(folder).get("model_type") if folder else "encoder"
        if kind in _CLASSIFIERS and kind not in ("bart", "mbart"):
            patterns = ["*bias*", "*LayerNorm.weight*"]
        elif kind not in ("bart", "mbart"):
            patterns = []
    if patterns:
        found.default("optimizer.no_weight_decay", patterns, "names with `bias` or `LayerNorm.weight`")
    _continue(found)
    if get(_key(_D, "is_dev_file"), bool, True) and task:
        found.default("validation.seq_len", next(s.value for s in found.settings if s.option == "training.seq_len"))


_CLASSIFIERS = {
    kind: f"{name}ForSequenceClassification"
    for kind, name in {
        "bart": "Bart", "mbart": "MBart", "bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert",
        "electra": "Electra", "camembert": "Camembert", "xlm-roberta": "XLMRoberta", "longformer": "Longformer",
        "mpnet": "MPNet", "deberta": "Deberta", "deberta-v2": "DebertaV2",
    }.items()
}  # fmt: skip
"""Values of model_type for which a class of the transformers library trains, because no native model exists."""


def _processes(found: FileMigration) -> int:
    """Set the processes of the run, and note the required options of each node's command line."""
    nodes = found.get(_key(_N, "nodes"), int, 1)
    gpus = found.get(_key(_N, "gpus"), int, 1)
    node = found.get(_key(_N, "current_node"), int, 0)
    address = found.get(_key(_N, "master_addr"), str)
    port = found.get(_key(_N, "master_port"), int, 29500)
    distributed = found.get(_key(_T, "is_distributed"), bool, True)
    for name, value, least in (("nodes", nodes, 1), ("gpus", gpus, 1), ("current_node", node, 0)):
        if value < least:
            found.problems.append(_wrong(found, name, value, f"must be at least {least}", "correct it"))
    if not 0 < port < 65_536:
        found.problems.append(_wrong(found, "master_port", port, "must be a port, 1 to 65535", "correct it"))
    if found.problems:
        return 1
    machine = found.machine

    # One process with DataParallel over local devices becomes one process per device. They share
    # the batch.
    if not distributed:
        text = "all local devices share the batch, as DataParallel did, each as a process of its own"
        found.answer(_key(_T, "is_distributed"), "honoured", text)
        for name in ("nodes", "gpus", "current_node", "master_addr", "master_port"):
            found.answer(_key(_N, name), "ignored", "it is read with is_distributed alone")
        batch = found.get(_key(_T, "batch_size"), int, 8)
        batch = max(1, batch // max(1, found.get(_key(_T, "gradient_accumulation_steps"), int, 1)))
        devices = found.num_processes or machine.nproc or machine.devices or 1
        # The batch is that of all devices, so use the largest number of devices that divides it.
        used = found.num_processes or max(count for count in range(1, devices + 1) if batch % count == 0)
        found.launch = {"nproc": used}
        if used < devices:
            found.notes.append(f"{used} of {devices} devices are used: no more of them divide a batch of {batch} rows")
        elif used > 1:
            found.notes.append(
                f"is_distributed is false: DataParallel's {batch} rows are dealt to {used} processes, each with a "
                "device of its own; the numbers are those of one"
            )
        return used

    # One process per device of every node. They rendezvous at the first node.
    found.set(_key(_N, "nodes"), "launch.nodes", nodes)
    found.set(_key(_N, "gpus"), "launch.nproc_per_node", gpus)
    found.answer(_key(_T, "is_distributed"), "honoured", "a process per device")
    if node >= nodes:
        rule = f"must be below nodes={nodes}"
        found.problems.append(_wrong(found, "current_node", node, rule, "count from 0, and give all nodes in nodes"))
    if nodes > 1:
        if not address:
            rule = "is needed where there are several nodes"
            found.problems.append(_wrong(found, "master_addr", None, rule, "name the first node"))
        endpoint = f"{address}:{port}"
        found.answer(_key(_N, "current_node"), "honoured", f"--node_rank {node}")
        for name in ("master_addr", "master_port"):
            found.answer(_key(_N, name), "honoured", f"--rdzv_endpoint {endpoint}")
        found.launch = {"nnodes": str(nodes), "node_rank": node, "rdzv_endpoint": endpoint}
    else:
        for name in ("current_node", "master_addr", "master_port"):
            found.answer(_key(_N, name), "ignored", "one node needs none of it")
    found.launch["nproc"] = machine.nproc or gpus
    return found.num_processes or (machine.nodes or nodes) * (machine.nproc or gpus)


def _wrong(found: FileMigration, name: str, value: Any, rule: str, fix: str) -> Problem:
    return Problem(f"{_N}{name}", value, rule, fix, found.where(_key(_N, name)))


def _hooks(found: FileMigration) -> bool:
    """Translate the file of hooks, by its classes. Return True if rows are texts with labels."""
    key = _key(_T, "hooks_file")
    given = found.get(key, str)
    if not given:
        found.answer(key, "ignored", "it is empty")
        return True
    path = _home(given)
    try:
        names = _classes(Path(path))
        facts = read_task_file(path) if "Task" in names else None
    except ConfigError as error:
        wrong = [problem for problem in error.problems if isinstance(problem, Problem)]
        found.problems += [Problem(f"{_T}hooks_file", given, p.rule, p.fix, found.where(key)) for p in wrong]
        return True
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        rule = f"cannot be read as a Python file ({error.strerror if isinstance(error, OSError) else error})"
        found.problems.append(Problem(f"{_T}hooks_file", given, rule, "correct it", found.where(key)))
        return True
    if not names & {"Task", "Model"}:
        rule = "defines neither a class Task nor a class Model"
        fix = "see docs/migrate/universal_trainer.md"
        found.problems.append(Problem(f"{_T}hooks_file", given, rule, fix, found.where(key)))
    if facts is not None:
        found.set(key, "task.name", path, "its class Task")
        metric = next((name for name in facts.metrics if name != "loss"), "loss")
        found.default("checkpoint.keep_best", f"validation.{metric}", "the first of its METRICS")
    if "Model" in names:
        found.set(key, "model.name", path, "its class Model")
    return "Task" not in names or bool(found.get(_key(_D, "data_dir"), str))


def _classes(file: Path) -> set[str]:
    """Names assigned at module level of a Python file, found by parsing it."""
    module = own_file.parse(file)
    names: set[str] = set()
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names if alias.asname}
    return names


def _continue(found: FileMigration) -> None:
    """Translate ``continue_training``: a checkpoint-N file of the program, or a shardtrain checkpoint."""
    key = _key(_T, "continue_training")
    place = _key(_T, "continue_training_path")
    path = found.get(place, str)
    if not found.get(key, bool, False):
        found.answer(
            key, "ignored", "a run continues by itself from what its model_dir holds; another one starts from scratch"
        )
        found.answer(place, "ignored", "it is read with continue_training alone")
    elif not path:
        found.answer(key, "honoured", "the run continues from the newest checkpoint of its model_dir")
        found.answer(place, "ignored", "it is empty")
    else:
        found.answer(key, "honoured", "weights, optimizer, loss scale, step and rate of the file")
        found.set(place, "checkpoint.initial_load_path", _home(path), "unless model_dir holds a newer one")
        found.default("checkpoint.initial_load_model_only", False)
        found.settings = [s for s in found.settings if s.option not in _OF_FOLDER]
        found.entries = [entry for entry in found.entries if entry.option not in _OF_FOLDER]


_OF_FOLDER = ("checkpoint.initial_load_in_hf", "checkpoint.initial_load_legacy_bin")


def _batch(found: FileMigration, world: int) -> int:
    """Set the batch of each process, and return the rows of a step per process."""
    batch = found.get(_key(_T, "batch_size"), int, 8)
    accumulated = found.get(_key(_T, "gradient_accumulation_steps"), int, 1)
    distributed = found.get(_key(_T, "is_distributed"), bool, True)
    for name, value in (("batch_size", batch), ("gradient_accumulation_steps", accumulated)):
        if value < 1:
            key = _key(_T, name)
            problem = Problem(key.replace("\0", "."), value, "must be at least 1", "correct it", found.where(key))
            found.problems.append(problem)
            return 1
    why = "rows of each process" if distributed else "the batch was that of all devices together"
    rows = batch if distributed else max(1, batch // accumulated // world)
    found.set(_key(_T, "batch_size"), "training.local_batch_size", rows, why)
    if accumulated > 1 or not distributed:
        key = _key(_T, "gradient_accumulation_steps")
        total = rows * accumulated * world
        found.set(key, "training.global_batch_size", total, f"rows of a step of {world} processes")
    found.answer(_key(_T, "gradient_accumulation_steps"), "honoured", "nothing is accumulated")
    found.default("training.last_batch", "keep", "an epoch's last step holds what is left of its rows")
    found.default("validation.local_batch_size", rows)
    return rows * accumulated


def _sharding(found: FileMigration, world: int) -> None:
    """Translate the four options of fairscale: FSDP, or an optimizer that is sharded over replicas."""
    names = ("optimizer_sharding", "model_sharding", "autowrap", "reshard_forward")
    place = {name: _key(_T, f"use_fairscale_{name}") for name in names}
    is_on = {name: found.get(place[name], bool, False) for name in names}
    if is_on["model_sharding"]:
        found.set(place["model_sharding"], "parallelism.data_parallel_shard_degree", -1)
        value = "always" if is_on["reshard_forward"] else "never"
        found.set(place["reshard_forward"], "parallelism.fsdp_reshard_after_forward", value)
        text = "blocks are sharded one by one all the same, which takes less memory"
        if is_on["autowrap"]:
            text = "each block is sharded by itself"
        found.answer(place["autowrap"], "honoured", text)
        found.answer(place["optimizer_sharding"], "honoured", "the optimizer's state is sharded with the model")
    elif world > 1:
        found.default("parallelism.data_parallel_replicate_degree", world, "each process held the whole model")
        found.default("parallelism.data_parallel_shard_degree", 1, "each process held the whole model")
        if is_on["optimizer_sharding"]:
            found.set(place["optimizer_sharding"], "parallelism.shard_optimizer_states", True)

    # All keys without a result.
    text = "one process has nothing to shard"
    if world > 1 or is_on["model_sharding"]:
        text = "nothing is sharded by it"
    for name in names:
        found.answer(place[name], "ignored", text)


def _data(found: FileMigration, step_rows: int) -> None:
    """Set the data from files in data_dir or from hooks, and options that are counted in epochs."""
    folder = found.get(_key(_D, "data_dir"), str)
    key = _key(_D, "is_dev_file")
    evaluates = found.get(key, bool, True)
    own_rows = any(s.option == "task.name" for s in found.settings) and not folder
    if own_rows:
        found.answer(_key(_D, "data_dir"), "ignored", "it is empty: the hooks have the rows")
        for option in ("training.dataset", "validation.dataset", "task.test_dataset_path"):
            found.default(option, "")
    elif not folder:
        found.answer(_key(_D, "data_dir"), "ignored", "it is empty")
        for name in (key, _key(_T, "log_steps_ratio"), _key(_T, "save_steps_ratio")):
            found.answer(name, "ignored", "there is no data_dir")
        return

    # Users of the program have one file each for training, development and test.
    base = Path(_home(folder or ""))
    if not own_rows:
        train = str(_file(base, "train"))
        found.set(_key(_D, "data_dir"), "training.dataset_path", train, "sentence<TAB>label, no header")
        found.default("training.dataset", "tsv")
        found.default("data.text_field", "0", "the first column")
        found.default("task.label_field", "1", "the second column")
        if _file(base, "test").is_file() or not _file(base, "train").is_file():
            found.default("task.test_dataset_path", str(_file(base, "test")))
        found.default("validation.dataset", "tsv")
        found.default("validation.dataset_path", str(_file(base, "dev")))
    if evaluates:
        found.set(key, "validation.enable", True)
        found.default("validation.per_epoch", 1)
        found.default("checkpoint.keep_best", "validation.accuracy", "the best step was to be typed by hand")
    else:
        found.set(key, "validation.enable", False)
        found.settings = [s for s in found.settings if s.option != "checkpoint.keep_best"]
        found.entries = [entry for entry in found.entries if entry.option != "checkpoint.keep_best"]

    # Fractions of an epoch become steps if the rows of the file can be counted.
    rows = 0 if own_rows else _rows(_file(base, "train"))
    steps = -(-rows // max(1, step_rows))
    for name, option in (("log_steps_ratio", "metrics.log_freq"), ("save_steps_ratio", "checkpoint.interval")):
        ratio = found.get(_key(_T, name), int, 1)
        if steps and ratio > 0:
            found.set(_key(_T, name), option, max(1, steps // ratio), f"{ratio} in an epoch of {steps} steps")
        else:
            text = f"the data are not here to be counted; set {option}, in steps"
            found.answer(_key(_T, name), "ignored", text)


def _file(base: Path, part: str) -> Path:
    """Return the file of one part: the first that exists of the usual names."""
    names = [f"sentiment-{part}", f"sentiment-{part}.tsv", f"{part}.tsv"]
    return next((base / name for name in names if (base / name).is_file()), base / names[0])


def _rows(file: Path) -> int:
    try:
        if file.stat().st_size > MAX_COUNTED_BYTES:
            return 0
        with file.open("rb") as opened:
            lines = 0
            last = b"\n"
            while block := opened.read(2**20):
                lines += block.count(b"\n")
                last = block[-1:]
            return lines + (last != b"\n")  # the last line may have no end
    except OSError:
        return 0


def _positions(folder: str | None) -> int:
    """Return the largest number of tokens of a folder's model, or 1024 (BART's) if it is unknown."""
    most = _facts(folder).get("max_position_embeddings")
    return most if isinstance(most, int) and not isinstance(most, bool) and 0 < most <= 8192 else 1024


def _facts(folder: str | None) -> dict[str, Any]:
    """Return config.json of a folder. Without a folder, return that of BART, the program's own model."""
    return facts_of_folder(folder) or {"model_type": "bart"}
