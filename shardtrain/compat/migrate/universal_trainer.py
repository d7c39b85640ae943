"""Reader of pytorch_universal_trainer's ``parameters.yml``, which trains a classifier on TSV files without a header."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain.compat.migrate.document import facts_of_folder
from shardtrain.compat.migrate.migration_report import JOINED, FileMigration, Rule, To
from shardtrain.config.task_file import read_task_file
from shardtrain.facts.ports import RENDEZVOUS_PORT
from shardtrain.utils import atomic_io, own_file
from shardtrain.utils.errors import ConfigError, Problem

SYSTEM = "pytorch_universal_trainer"
OPEN = "only hooks can read it, as self.config.task.options: set hooks_file to their file"
LEAVES: frozenset[str] = frozenset()
MAX_COUNTED_BYTES = 2**31
# Sections of the file, as the prefix of dotted keys.
_T = "transformers-params."
_D = "data-params."
_N = "dist-params."


def looks(values: Mapping[str, Any]) -> bool:
    """True if the top-level keys are the sections of a parameters.yml."""
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
    f"{_T}use_native_fp16": To(
        "training.mixed_precision_param", bool, lambda on: "float16" if on else "float32"
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
    """Return the flat key of a name in a section such as "dist-params."."""
    return f"{section[:-1]}\0{name}"


def prepare(migration: FileMigration) -> None:
    """Pass the user's own keys to hooks as task.options. They have no rules."""
    hooks = migration.get(_key(_T, "hooks_file"), str)
    # Only hooks can read further keys.
    if not hooks:
        return
    own_keys = [key for key in migration.values if key.replace("\0", ".") not in KEYS]
    for key in own_keys:
        section, _, name = key.rpartition("\0")
        # A key outside the three sections is a typo, which the rules report.
        if section not in (_T[:-1], _D[:-1], _N[:-1]):
            continue
        # Options of a task are plain values.
        value = migration.values[key]
        if value is not None and not isinstance(value, int | float | bool | str):
            migration.problems.append(
                Problem(
                    key.replace("\0", "."),
                    None,
                    rule="must be a number, text, true or false",
                    fix="write it as text, which a hook can parse",
                    where=migration.where(key),
                )
            )
        elif value is not None:
            migration.set(
                key, f"task.options.{name}", value, "hooks can read it as self.config.task.options"
            )
        else:
            migration.record(key, "ignored", "it is empty")


def finish(migration: FileMigration) -> None:
    """Translate the keys that depend on each other, and set options that are constants in the program."""
    get = migration.get
    # Later steps depend on the number of processes and on what the hooks define.
    world = _processes(migration)
    has_text_rows = _hooks(migration)
    rows = _batch(migration, world)
    _data(migration, world * rows)
    mode = str(get(_key(_T, "mode"), str, "train"))
    if mode not in ("train", "test"):
        migration.problems.append(
            Problem(
                f"{_T}mode",
                mode,
                rule="must be train or test",
                fix="correct it (test also accepts a file without labels, and writes predictions)",
                where=migration.where(_key(_T, "mode")),
            )
        )
    migration.verb = mode
    migration.record(
        _key(_T, "mode"),
        "honoured",
        f"shardtrain.compat.main runs `shardtrain {mode}` with this file",
    )
    folder = get(_key(_T, "pretrained_model_dir"), str)
    # A model file of hooks has its own weights. Then the folder only contains the tokenizer.
    has_own_model = any(setting.option == "model.name" for setting in migration.settings)
    if folder and not has_own_model:
        migration.set(_key(_T, "pretrained_model_dir"), "model.hf_assets_path", _home(folder))
        migration.default(
            "model.flavor", "from_folder", "the folder's config.json determines the model"
        )
        migration.default(
            "checkpoint.initial_load_in_hf", True, "training starts from the folder's weights"
        )
        # Without safetensors, the weights are a pickle, which requires an option.
        base = Path(_home(folder))
        if (base / "pytorch_model.bin").is_file() and not any(base.glob("model*.safetensors*")):
            migration.default(
                "checkpoint.initial_load_legacy_bin",
                True,
                "weights are in pytorch_model.bin, which is read without running code",
            )
        # Architectures without a native implementation use the classes of the library.
        architecture = _CLASSIFIERS.get(str(_facts(folder).get("model_type")))
        if architecture:
            labels = get(_key(_T, "num_labels"), int, 2)
            migration.default(
                "model.name", "transformers", f"{architecture} comes from the transformers library"
            )
            if architecture not in (_facts(folder).get("architectures") or [architecture]):
                migration.default(
                    "model.overrides.architecture",
                    architecture,
                    "the folder's encoder with a new head",
                )
            migration.default(
                "model.overrides.num_labels", labels, "config.json may have another number"
            )
            migration.default("model.overrides.dropout", True, "with the rates of config.json")
    elif folder:
        migration.set(
            _key(_T, "pretrained_model_dir"),
            "model.hf_assets_path",
            _home(folder),
            "for its tokenizer",
        )
    migration.record(_key(_T, "pretrained_model_dir"), "ignored", "it is empty")
    if not has_own_model and not folder:
        migration.default(
            "model.name",
            "encoder",
            "no folder is set, so a built-in encoder on bytes is trained from scratch",
        )
        migration.default("model.flavor", "small")
    migration.default("task.name", "classification")
    _sharding(migration, world)
    cuts_rows = get(_key(_T, "use_max_length"), bool, False)
    # 200 is the program's default.
    limit = get(_key(_T, "max_length"), int, 200)
    if cuts_rows:
        migration.set(_key(_T, "max_length"), "training.seq_len", limit)
        migration.record(
            _key(_T, "use_max_length"), "honoured", f"rows are cut after {limit} tokens"
        )
    else:
        # A batch is padded to its longest row, so a high limit costs nothing.
        most = _positions(folder)
        migration.default(
            "training.seq_len",
            most,
            "without use_max_length, rows may be as long as the model supports",
        )
        migration.record(
            _key(_T, "use_max_length"),
            "honoured",
            f"rows may have {most} tokens; a batch is padded to its longest row",
        )
        migration.record(_key(_T, "max_length"), "ignored", "only used with use_max_length")
    # Constants in the program's code.
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
        migration.default(option, value)

    # The program excludes these names from weight decay. The norms of BART are named layer_norm and
    # layernorm_embedding and match none of them, so they decay as in the program. Each pattern must
    # match a parameter.
    patterns = ["*bias*"]
    if not has_own_model:
        kind = _facts(folder).get("model_type") if folder else "encoder"
        if kind in _CLASSIFIERS and kind not in ("bart", "mbart"):
            patterns = ["*bias*", "*LayerNorm.weight*"]
        elif kind not in ("bart", "mbart"):
            patterns = []
    if patterns:
        migration.default(
            "optimizer.no_weight_decay", patterns, "names with `bias` or `LayerNorm.weight`"
        )
    # This may remove the initial weights that were set above.
    _continue(migration)
    if get(_key(_D, "is_dev_file"), bool, True) and has_text_rows:
        migration.default(
            "validation.seq_len",
            next(s.value for s in migration.settings if s.option == "training.seq_len"),
        )


_CLASSIFIERS = {
    kind: f"{name}ForSequenceClassification"
    for kind, name in {
        "bart": "Bart", "mbart": "MBart", "bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert",
        "electra": "Electra", "camembert": "Camembert", "xlm-roberta": "XLMRoberta", "longformer": "Longformer",
        "mpnet": "MPNet", "deberta": "Deberta", "deberta-v2": "DebertaV2",
    }.items()
}  # fmt: skip
"""Class of the transformers library for each model_type without a native implementation."""


def _processes(migration: FileMigration) -> int:
    """Return the number of processes, and set the launch options of this node."""
    nodes = migration.get(_key(_N, "nodes"), int, 1)
    gpus = migration.get(_key(_N, "gpus"), int, 1)
    node = migration.get(_key(_N, "current_node"), int, 0)
    address = migration.get(_key(_N, "master_addr"), str)
    port = migration.get(_key(_N, "master_port"), int, RENDEZVOUS_PORT)
    distributed = migration.get(_key(_T, "is_distributed"), bool, True)
    for name, value, least in (("nodes", nodes, 1), ("gpus", gpus, 1), ("current_node", node, 0)):
        if value < least:
            migration.problems.append(
                _wrong(migration, name, value, f"must be at least {least}", "correct it")
            )
    if not 0 < port < 65_536:
        migration.problems.append(
            _wrong(
                migration, "master_port", port, "must be a port between 1 and 65535", "correct it"
            )
        )
    # Wrong numbers make the rest meaningless.
    if migration.problems:
        return 1
    machine = migration.machine

    # The program uses one process with DataParallel here. Start a process per local device instead,
    # and divide the batch among them.
    if not distributed:
        text = (
            "the local devices share the batch as with DataParallel, with a separate process each"
        )
        migration.record(_key(_T, "is_distributed"), "honoured", text)
        for name in ("nodes", "gpus", "current_node", "master_addr", "master_port"):
            migration.record(_key(_N, name), "ignored", "only used with is_distributed")
        # The batch of a step is divided by the accumulation steps, as in the program.
        batch = migration.get(_key(_T, "batch_size"), int, 8)
        batch = max(
            1, batch // max(1, migration.get(_key(_T, "gradient_accumulation_steps"), int, 1))
        )
        devices = migration.num_processes or machine.nproc or machine.devices or 1
        # The batch belongs to all devices, so use the largest number of devices that divides it.
        divisors = [count for count in range(1, devices + 1) if batch % count == 0]
        used = migration.num_processes or max(divisors)
        migration.launch = {"nproc": used}
        if used < devices:
            migration.notes.append(
                f"{used} of {devices} devices are used: the batch of {batch} rows must be divisible by their number"
            )
        elif used > 1:
            migration.notes.append(
                f"is_distributed is false: {used} processes, one for each device, "
                f"share DataParallel's {batch} rows; the numbers equal those of a single process"
            )
        return used

    # One process per device of every node. They rendezvous at the first node.
    migration.set(_key(_N, "nodes"), "launch.nodes", nodes)
    migration.set(_key(_N, "gpus"), "launch.nproc_per_node", gpus)
    migration.record(_key(_T, "is_distributed"), "honoured", "each device has a process")
    if node >= nodes:
        rule = f"must be less than nodes={nodes}"
        migration.problems.append(
            _wrong(
                migration,
                "current_node",
                node,
                rule,
                "count nodes from 0, and set nodes to their number",
            )
        )
    if nodes > 1:
        if not address:
            rule = "is required for several nodes"
            migration.problems.append(
                _wrong(migration, "master_addr", None, rule, "set it to the host of the first node")
            )
        endpoint = f"{address}:{port}"
        migration.record(_key(_N, "current_node"), "honoured", f"--node_rank {node}")
        for name in ("master_addr", "master_port"):
            migration.record(_key(_N, name), "honoured", f"--rdzv_endpoint {endpoint}")
        migration.launch = {"nnodes": str(nodes), "node_rank": node, "rdzv_endpoint": endpoint}
    else:
        for name in ("current_node", "master_addr", "master_port"):
            migration.record(_key(_N, name), "ignored", "only used with several nodes")
    migration.launch["nproc"] = machine.nproc or gpus
    return migration.num_processes or (machine.nodes or nodes) * (machine.nproc or gpus)


def _wrong(migration: FileMigration, name: str, value: Any, rule: str, fix: str) -> Problem:
    """Return a problem with a key of dist-params."""
    return Problem(f"{_N}{name}", value, rule, fix, migration.where(_key(_N, name)))


def _hooks(migration: FileMigration) -> bool:
    """Translate the file of hooks by the classes it defines. Return True if rows are texts with labels."""
    key = _key(_T, "hooks_file")
    given = migration.get(key, str)
    if not given:
        migration.record(key, "ignored", "it is empty")
        return True

    def refuse(rule: str, fix: str) -> None:
        where = migration.where(key)
        migration.problems.append(Problem(f"{_T}hooks_file", given, rule, fix, where))

    path = _home(given)
    try:
        names = _classes(Path(path))
        facts = read_task_file(path) if "Task" in names else None
    except ConfigError as error:
        for problem in error.problems:
            if isinstance(problem, Problem):
                refuse(problem.rule, problem.fix)
        return True
    except (OSError, SyntaxError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        refuse(f"cannot be read as a Python file ({reason})", "correct it")
        return True
    if not names & {"Task", "Model"}:
        rule = "must define a class Task or a class Model"
        refuse(rule, "see docs/migrate/universal_trainer.md")
    # The task's metrics are known from its file. The first one besides the loss selects the best checkpoint.
    if facts is not None:
        migration.set(key, "task.name", path, "its class Task")
        metric = next((name for name in facts.metrics if name != "loss"), "loss")
        migration.default(
            "checkpoint.keep_best", f"validation.{metric}", "the first metric in the file's METRICS"
        )
    if "Model" in names:
        migration.set(key, "model.name", path, "its class Model")
    return "Task" not in names or bool(migration.get(_key(_D, "data_dir"), str))


def _classes(file: Path) -> set[str]:
    """Return the names assigned at module level of a Python file, found by parsing it."""
    # Any assignment or import may define a class, because the file is not run.
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


def _continue(migration: FileMigration) -> None:
    """Translate ``continue_training``, from a checkpoint-N file of the program or from a shardtrain checkpoint."""
    key = _key(_T, "continue_training")
    place = _key(_T, "continue_training_path")
    path = migration.get(place, str)
    if not migration.get(key, bool, False):
        # The program starts anew without this key, and our runs always resume.
        migration.record(
            key,
            "ignored",
            "a run resumes automatically from checkpoints in its model_dir; use another folder to start anew",
        )
        migration.record(place, "ignored", "only used with continue_training")
    elif not path:
        migration.record(
            key, "honoured", "the run resumes from the newest checkpoint in its model_dir"
        )
        migration.record(place, "ignored", "it is empty")
    else:
        migration.record(
            key, "honoured", "restores weights, optimizer, loss scale, step and learning rate"
        )
        migration.set(
            place,
            "checkpoint.initial_load_path",
            _home(path),
            "unless model_dir contains a newer checkpoint",
        )
        migration.default("checkpoint.initial_load_model_only", False)
        # The checkpoint replaces the weights of the folder.
        migration.settings = [s for s in migration.settings if s.option not in _OF_FOLDER]
        migration.entries = [entry for entry in migration.entries if entry.option not in _OF_FOLDER]


_OF_FOLDER = ("checkpoint.initial_load_in_hf", "checkpoint.initial_load_legacy_bin")


def _batch(migration: FileMigration, world: int) -> int:
    """Set the batch size per process. Return the number of rows per process and optimizer step."""
    batch = migration.get(_key(_T, "batch_size"), int, 8)
    accumulated = migration.get(_key(_T, "gradient_accumulation_steps"), int, 1)
    distributed = migration.get(_key(_T, "is_distributed"), bool, True)
    # A batch below 1 makes the other sizes meaningless.
    for name, value in (("batch_size", batch), ("gradient_accumulation_steps", accumulated)):
        if value < 1:
            key = _key(_T, name)
            problem = Problem(
                key.replace("\0", "."),
                value,
                "must be at least 1",
                "correct it",
                migration.where(key),
            )
            migration.problems.append(problem)
            return 1
    rows = batch
    why = "rows per process"
    if not distributed:
        rows = max(1, batch // accumulated // world)
        why = "batch_size is the sum over all devices"
    migration.set(_key(_T, "batch_size"), "training.local_batch_size", rows, why)
    if accumulated > 1 or not distributed:
        key = _key(_T, "gradient_accumulation_steps")
        total = rows * accumulated * world
        migration.set(
            key,
            "training.global_batch_size",
            total,
            f"rows per optimizer step of {world} processes",
        )
    migration.record(
        _key(_T, "gradient_accumulation_steps"), "honoured", "no gradients are accumulated"
    )
    migration.default(
        "training.last_batch", "keep", "the last step of an epoch has the remaining rows"
    )
    migration.default("validation.local_batch_size", rows)
    return rows * accumulated


def _sharding(migration: FileMigration, world: int) -> None:
    """Translate the four fairscale options: FSDP, or replicas with a sharded optimizer."""
    names = ("optimizer_sharding", "model_sharding", "autowrap", "reshard_forward")
    place = {name: _key(_T, f"use_fairscale_{name}") for name in names}
    is_on = {name: migration.get(place[name], bool, False) for name in names}
    # Sharding the model includes its optimizer state.
    if is_on["model_sharding"]:
        migration.set(place["model_sharding"], "parallelism.data_parallel_shard_degree", -1)
        value = "always" if is_on["reshard_forward"] else "never"
        migration.set(place["reshard_forward"], "parallelism.fsdp_reshard_after_forward", value)
        text = "each block is sharded separately in any case, to save memory"
        if is_on["autowrap"]:
            text = "each block is sharded separately"
        migration.record(place["autowrap"], "honoured", text)
        migration.record(
            place["optimizer_sharding"], "honoured", "the optimizer state is sharded with the model"
        )
    elif world > 1:
        migration.default(
            "parallelism.data_parallel_replicate_degree",
            world,
            "each process has a full copy of the model",
        )
        migration.default(
            "parallelism.data_parallel_shard_degree", 1, "each process has a full copy of the model"
        )
        if is_on["optimizer_sharding"]:
            migration.set(place["optimizer_sharding"], "parallelism.shard_optimizer_states", True)

    # Record all keys without a result.
    text = "a single process does not shard"
    if world > 1 or is_on["model_sharding"]:
        text = "it is off, included by another option, or has no effect without use_fairscale_model_sharding"
    for name in names:
        migration.record(place[name], "ignored", text)


def _data(migration: FileMigration, step_rows: int) -> None:
    """Set the datasets, from files in data_dir or from hooks, and the intervals of logging and saving."""
    folder = migration.get(_key(_D, "data_dir"), str)
    key = _key(_D, "is_dev_file")
    evaluates = migration.get(key, bool, True)
    # A task of hooks reads its own rows unless a folder is set.
    hooks_read_rows = any(s.option == "task.name" for s in migration.settings) and not folder
    if hooks_read_rows:
        migration.record(_key(_D, "data_dir"), "ignored", "it is empty: the hooks read the rows")
        for option in ("training.dataset", "validation.dataset", "task.test_dataset_path"):
            migration.default(option, "")
    elif not folder:
        migration.record(_key(_D, "data_dir"), "ignored", "it is empty")
        for name in (key, _key(_T, "log_steps_ratio"), _key(_T, "save_steps_ratio")):
            migration.record(name, "ignored", "data_dir is empty")
        return

    # The program expects separate files for training, development and test.
    base = Path(_home(folder or ""))
    if not hooks_read_rows:
        train = str(_file(base, "train"))
        migration.set(
            _key(_D, "data_dir"), "training.dataset_path", train, "sentence<TAB>label, no header"
        )
        migration.default("training.dataset", "tsv")
        migration.default("data.text_field", "0", "the first column")
        migration.default("task.label_field", "1", "the second column")
        # Without a training file, the folder may be for ``test`` only.
        if _file(base, "test").is_file() or not _file(base, "train").is_file():
            migration.default("task.test_dataset_path", str(_file(base, "test")))
        migration.default("validation.dataset", "tsv")
        migration.default("validation.dataset_path", str(_file(base, "dev")))
    if evaluates:
        migration.set(key, "validation.enable", True)
        migration.default("validation.per_epoch", 1)
        migration.default(
            "checkpoint.keep_best",
            "validation.accuracy",
            "the program requires the best step as an argument",
        )
    else:
        migration.set(key, "validation.enable", False)
        migration.settings = [s for s in migration.settings if s.option != "checkpoint.keep_best"]
        migration.entries = [
            entry for entry in migration.entries if entry.option != "checkpoint.keep_best"
        ]

    # Fractions of an epoch become steps if the rows of the file can be counted.
    rows = 0 if hooks_read_rows else _rows(_file(base, "train"))
    # The last step of an epoch may be smaller, so round up.
    steps = -(-rows // max(1, step_rows))
    for name, option in (
        ("log_steps_ratio", "metrics.log_freq"),
        ("save_steps_ratio", "checkpoint.interval"),
    ):
        ratio = migration.get(_key(_T, name), int, 1)
        if steps and ratio > 0:
            migration.set(
                _key(_T, name),
                option,
                max(1, steps // ratio),
                f"{ratio} times per epoch of {steps} steps",
            )
        else:
            text = f"the rows cannot be counted here; set {option} to a number of steps"
            migration.record(_key(_T, name), "ignored", text)


def _file(base: Path, part: str) -> Path:
    """Return the file of "train", "dev" or "test": the first existing file of the usual names."""
    names = [f"sentiment-{part}", f"sentiment-{part}.tsv", f"{part}.tsv"]
    for name in names:
        if (base / name).is_file():
            return base / name
    return base / names[0]


def _rows(file: Path) -> int:
    """Return the number of lines of a file. 0 if it cannot be read or is larger than ``MAX_COUNTED_BYTES``."""
    try:
        # Counting a very large file would delay the command.
        if file.stat().st_size > MAX_COUNTED_BYTES:
            return 0
        with open(file, "rb", opener=atomic_io.without_waiting) as opened:
            lines = 0
            last = b"\n"
            while block := opened.read(2**20):
                lines += block.count(b"\n")
                last = block[-1:]
            # The last line may have no line break.
            return lines + (last != b"\n")
    except OSError:
        return 0


def _positions(folder: str | None) -> int:
    """Return the maximum sequence length of a folder's model, or 1024 as for BART if it is unknown."""
    most = _facts(folder).get("max_position_embeddings")
    # type() and not isinstance(), because a bool is an int too
    if type(most) is int and 0 < most <= 8192:
        return most
    return 1024


def _facts(folder: str | None) -> dict[str, Any]:
    """Return the content of config.json in a folder.

    Without one, the model is BART, the program's default.
    """
    return facts_of_folder(folder) or {"model_type": "bart"}
