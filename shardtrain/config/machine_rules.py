"""Rules that depend on this machine: number of ranks, devices, files and installed packages."""

from __future__ import annotations

import contextlib
import errno
import glob
import importlib.util
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardtrain.config import certificate, ramps
from shardtrain.config.assets import tokenizer_folder
from shardtrain.config.derived import compute_dtype, other_degrees
from shardtrain.config.load import Loaded
from shardtrain.config.rules.checkpoint_rules import check_pinned
from shardtrain.config.rules.data_rules import datasets
from shardtrain.config.rules.experts_rules import check_experts_of_world
from shardtrain.config.rules.float8_rules import needs_float8_matmuls, needs_mx_matmuls
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.config.rules.pipeline_rules import check_microbatches, rows_of_steps
from shardtrain.config.rules.ramp_rules import BATCH, check_batch_on
from shardtrain.config.rules.safety_rules import (
    ALSO_ELSEWHERE,
    BELOW_DUMP_FOLDER,
    FILES_OF_A_RUN,
    FOLDERS_OF_LIBRARIES,
)
from shardtrain.config.rules.values import any_of, problem
from shardtrain.config.schema import Config
from shardtrain.config.stages import num_stages
from shardtrain.utils import bounded_reads, checked_json
from shardtrain.utils.errors import Problem

MAX_RANKS = 65_536
"""Maximum world size, four times the largest measured one.

At this size, each rank that checks heartbeats would need half a core (docs/scale.md)."""
BEATS_PER_HANG_TIMEOUT = 10.0
"""Number of heartbeats that a node sends within the hang timeout."""
NODES_PER_SECOND = 700.0
"""Number of node heartbeats per second that a store can receive."""
_MOST_TOKENIZER_BYTES = 2**28
# one id for each of 256 bytes, and for BOS and EOS
BYTE_TOKENIZER_IDS = 258


def machine_notes(
    loaded: Loaded,
    world_size: int | None = None,
    device: str | None = None,
    num_devices: int | None = None,
) -> list[Problem]:
    """Return the problems of a config on this machine.

    Args:
        loaded: the configuration.
        world_size: number of ranks.
        device: type of the training device: "cpu", "cuda", "xpu" or "mps".
        num_devices: number of such devices on this host.

    Rules for an argument that is None are skipped.
    """
    notes: list[Problem] = []
    if world_size is not None:
        notes += mesh_notes(loaded, world_size)
    unreadable = certificate.problem_of(loaded)
    certificate_problems = [] if unreadable is None else [unreadable]
    return [
        *notes,
        *_device(loaded, device, num_devices),
        *_apple_gpu(loaded, world_size),
        *_compiler(loaded, device),
        *check_pinned(loaded, device),
        *_paths(loaded),
        *certificate_problems,
        *_folders(loaded),
        *_entries_of_run_folder(loaded),
        *_tokenizer(loaded),
        *_packages(loaded),
    ]


def watching_problem(loaded: Loaded, world_size: int, local_ranks: int) -> Problem | None:
    """Return a problem if the hang timeout is too short for one store to receive all heartbeats."""
    option = "comm.hang_timeout_seconds"
    limit = loaded.config.comm.hang_timeout_seconds
    nodes = math.ceil(world_size / max(1, local_ranks))
    least = math.ceil(BEATS_PER_HANG_TIMEOUT * nodes / NODES_PER_SECOND)
    if not limit or limit >= least:
        return None
    return Problem(
        option,
        limit,
        rule=f"is too short for {nodes:,} nodes: their heartbeats would be more than the store of a run can answer",
        fix=f"set it to {least} or more",
        where=loaded.where(option),
    )


_FOR_TRAINING = (
    "model.tokenizer_path",
    "model.hf_assets_path",
    "checkpoint.initial_load_path",
    "model.converters",
)
_FOLDERS_OF_A_RUN = ("job.dump_folder", "checkpoint.folder")


def is_for_training(problem: Problem) -> bool:
    """True if a model can be built despite the problem, such as a missing file, which only training needs."""
    if problem.rule.startswith("needs the package ") or problem.option in _FOLDERS_OF_A_RUN:
        return True
    if problem.option.endswith(".dataset_path") or problem.option in _FOR_TRAINING:
        return (
            problem.rule in ("does not exist", "matches no file")
            or problem.option == "model.converters"
        )
    return False


def mesh_notes(loaded: Loaded, world_size: int) -> Iterator[Problem]:
    """Check that the degrees multiply to the number of ranks and that the global batch is divisible."""
    p = loaded.config.parallelism
    others = other_degrees(loaded.config)
    if others < 1 or world_size < 1:
        return

    shard = p.data_parallel_shard_degree
    option = "parallelism.data_parallel_shard_degree"
    if world_size > MAX_RANKS:
        yield Problem(
            "--nproc",
            world_size,
            rule=(
                f"is a run of more than {MAX_RANKS:,} ranks, above which watching them takes more than a run can spare"
            ),
            fix="use fewer ranks, and give each more work",
            where="",
        )
        return

    # The product of the degrees must be the number of ranks. A shard degree of -1 is the quotient.
    if shard == -1 and world_size % others:
        yield _indivisible_ranks(loaded, world_size, others)
        return
    if shard > 0 and shard * others != world_size:
        # Keep the ranks if the other degrees divide them, else the degrees.
        fix = f"start {shard * others} ranks"
        if world_size % others == 0:
            fix = f"use -1 or {world_size // others}"
        yield problem(
            loaded,
            option,
            rule=f"times the other degrees ({others}) makes {shard * others} ranks, and there are {world_size}",
            fix=fix,
        )
        return

    # These rules are also checked without a world size if the configuration determines their numbers.
    # With a shard degree of -1 the number of data-parallel ranks, and thus of micro-batches, is only known here.
    yield from check_experts_of_world(loaded, world_size)
    if p.pipeline_parallel_degree > 1 and p.data_parallel_shard_degree == -1:
        layers = (model_shape(loaded) or {}).get("num_layers")
        if not rows_of_steps(loaded) and isinstance(layers, int):
            count = num_stages(loaded.config.parallelism, layers)
            for rows in rows_of_steps(loaded, world_size):
                yield from check_microbatches(loaded, rows, count)

    # The global batch must be a multiple of the sequences per pass.
    if shard == -1:
        shard = world_size // others
    yield from _accumulation(loaded, p.data_parallel_replicate_degree * shard)
    yield from check_batch_on(loaded, p.data_parallel_replicate_degree * shard)


def _indivisible_ranks(loaded: Loaded, world_size: int, others: int) -> Problem:
    """Return the problem of degrees whose product ``others`` does not divide the number of ranks."""
    # Report the largest degree, which a user would lower first.
    names = (
        "tensor_parallel_degree",
        "data_parallel_replicate_degree",
        "context_parallel_degree",
        "pipeline_parallel_degree",
    )
    name = max((f"parallelism.{name}" for name in names), key=loaded.value)
    rest = others // loaded.value(name)
    rule = f"cannot divide {world_size} ranks"
    if world_size == 1:
        rule = "cannot divide 1 rank"
    if rest > 1:
        rule += f" together with the other degrees ({rest})"
    fix = f"lower the other degrees to a divisor of {world_size}"
    legal = [n for n in range(1, world_size + 1) if world_size % (n * rest) == 0]
    if legal:
        fix = f"use {any_of(legal)}"
    return problem(loaded, name, rule, f"{fix}, or a multiple of {others} ranks")


def _accumulation(loaded: Loaded, data_ranks: int) -> Iterator[Problem]:
    """Reject gradient accumulation with early_step_in_backward, which updates after every pass."""
    config = loaded.config
    sizes = ramps.batch_sizes(config.training)
    if (
        config.optimizer.early_step_in_backward
        and sizes
        and sizes[-1] > config.training.local_batch_size * data_ranks >= 1
    ):
        yield problem(
            loaded,
            ramps.BATCH_RAMP if config.training.batch_ramp else BATCH,
            rule=(
                f"is more than one pass of {data_ranks} data-parallel ranks, and early_step_in_backward updates in each"
            ),
            fix="remove it, or raise local_batch_size",
        )


def _device(loaded: Loaded, device: str | None, num_devices: int | None) -> Iterator[Problem]:
    """Check that the device exists and supports the configured features."""
    c = loaded.config
    if c.training.device not in ("auto", "cpu") and (num_devices == 0 or device == "cpu"):
        yield problem(loaded, "training.device", "finds no such device here", 'use "cpu" or "auto"')
    if device is None:
        return
    if device != "cpu":
        yield from _split_sequences(loaded)
    # CUDA supports all of the following options.
    if device == "cuda":
        return
    name = "a CPU" if device == "cpu" else device
    if needs_float8_matmuls(loaded):
        yield problem(
            loaded,
            "model.converters",
            rule=f"needs float8 matmuls, which {name} does not support",
            fix="set emulate = true in its section for the same numbers at a low speed, or remove it",
        )
    if needs_mx_matmuls(loaded):
        yield problem(
            loaded,
            "model.converters",
            rule=f"needs MXFP8 matmuls (CUDA capability 10.0 or higher), which {name} does not support",
            fix=(
                'set quantize.linear.mx.recipe_name = "mxfp8_emulated" for the numbers of mxfp8_cublas at a low speed, '
                "or remove it"
            ),
        )
    if c.training.flash_attention != "FA2":
        yield problem(loaded, "training.flash_attention", "needs CUDA", "remove it")
    if c.profiling.enable_memory_snapshot:
        yield problem(loaded, "profiling.enable_memory_snapshot", "needs CUDA", "set it to false")


def _apple_gpu(loaded: Loaded, world_size: int | None) -> Iterator[Problem]:
    """Check what ``training.device = "mps"`` does not support: several ranks, FSDP, and PyTorch's compiler."""
    config = loaded.config
    if config.training.device != "mps":
        return
    if world_size is not None and world_size > 1:
        rule = "has no collectives, so it trains in one process"
        yield problem(loaded, "training.device", rule, 'use --nproc 1, or "cpu"')
    if config.compile.enable:
        yield problem(loaded, "compile.enable", "is not supported on mps", "remove it")
    if config.checkpoint.async_mode == "async_with_pinned_mem":
        rule = "has no use on mps, whose memory is the host's"
        yield problem(loaded, "checkpoint.async_mode", rule, 'use "async"')
    training = config.training
    needs_fsdp = {
        "training.dtype": training.dtype != "float32",
        "training.mixed_precision_reduce": training.mixed_precision_reduce != "float32",
        "training.enable_cpu_offload": training.enable_cpu_offload,
        "parallelism.fsdp_reshard_after_forward": (
            config.parallelism.fsdp_reshard_after_forward == "always"
        ),
    }
    for option, is_set in needs_fsdp.items():
        if is_set:
            rule = "needs FSDP, which mps does not support"
            yield problem(loaded, option, rule, "remove it")


def without_effect_on_a_cpu(config: Config) -> list[str]:
    """Return a note for each option that is set and has no effect on a CPU."""
    of_memory = {
        "training.enable_cpu_offload": config.training.enable_cpu_offload,
        "activation_checkpoint.cpu_offload": config.activation_checkpoint.cpu_offload,
    }
    rule = "has no effect on a CPU, whose memory is the host's"
    notes = [f"{option}=true {rule}" for option, is_set in of_memory.items() if is_set]
    if (
        config.parallelism.enable_async_tensor_parallel
        and config.parallelism.tensor_parallel_degree > 1
    ):
        rule = "has no effect on a CPU: collectives do not overlap with matmuls, and the numbers are the same"
        notes.append(f"parallelism.enable_async_tensor_parallel=true {rule}")
    return notes


def _split_sequences(loaded: Loaded) -> Iterator[Problem]:
    """Reject ring attention in float32 on accelerators, whose flash kernels support only 16-bit dtypes."""
    p = loaded.config.parallelism
    option = "training.mixed_precision_param"
    ring = p.context_parallel_degree > 1 and p.context_parallel_method == "ring"
    if ring and compute_dtype(loaded.config) == "float32":
        yield problem(
            loaded,
            option,
            rule="has no flash attention kernel on an accelerator, which splitting a sequence needs",
            fix='use bfloat16 or float16, or parallelism.context_parallel_method="ulysses"',
        )


def has_cpp_compiler() -> bool:
    """True if a C++ compiler is installed, which inductor needs for CPU kernels."""
    return any(
        shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++", "c++")
    )


def _compiler(loaded: Loaded, device: str | None) -> Iterator[Problem]:
    """Check that a C++ compiler exists if inductor compiles for the CPU."""
    c = loaded.config.compile
    if device != "cpu" or not c.enable or c.backend != "inductor":
        return
    if not has_cpp_compiler():
        yield problem(
            loaded,
            "compile.enable",
            rule="needs a C++ compiler on CPU",
            fix="install g++, or set it to false",
        )


def _paths(loaded: Loaded) -> Iterator[Problem]:
    """Check that the configured files and folders exist."""
    for name, source in datasets(loaded).items():
        path = source.dataset_path
        option = f"{name}.dataset_path"
        if not path or _found(path, on_hub=source.dataset == "huggingface"):
            continue
        if _is_pattern(path):
            yield problem(loaded, option, "matches no file", "correct the pattern")
        else:
            yield problem(loaded, option, *_ABSENT)

    # Options with a single file or folder. Those in object stores are not looked up.
    for option in (
        "checkpoint.initial_load_path",
        "lora.initial_load_path",
        "parallelism.pipeline_parallel_schedule_csv",
        "data.chat_template",
    ):
        value = loaded.value(option)
        if value and "://" not in value and not _exists(value):
            rule, fix = _ABSENT
            if (
                option == "checkpoint.initial_load_path"
                and loaded.config.checkpoint.initial_load_in_hf
            ):
                fix = f"{fix}, {_FETCH_MODEL}"
            yield problem(loaded, option, rule, fix)


def _folders(loaded: Loaded) -> Iterator[Problem]:
    """Yield a problem for each folder that the run could not create or write."""
    c = loaded.config
    # A relative checkpoint folder is inside the dump folder.
    written = {"job.dump_folder": c.job.dump_folder}
    if c.checkpoint.enable and not c.checkpoint.load_only and os.path.isabs(c.checkpoint.folder):
        written["checkpoint.folder"] = c.checkpoint.folder
    for option, folder in written.items():
        if not folder or "://" in folder:
            continue
        # Shells expand ~ only at the start of an argument, so not in --job.dump_folder=~/runs.
        if folder.startswith("~"):
            yield problem(
                loaded,
                option,
                rule="begins with ~, which is not expanded",
                fix=f"write {os.path.expanduser(folder)}",
            )
            continue
        parts = Path(folder).parts
        left = [
            os.path.join(*parts[:place])
            for place, name in enumerate(parts)
            if place and name == ".."
        ]
        absent = next((path for path in left if not os.path.isdir(path)), None)
        if absent:
            yield problem(
                loaded,
                option,
                f"leads through {absent}/.., but {absent} is not a folder",
                "remove both",
            )
            continue
        rule = _why_not_writable(Path(folder).absolute())
        if rule:
            yield problem(loaded, option, rule, "choose another folder")


def _entries_of_run_folder(loaded: Loaded) -> Iterator[Problem]:
    """Yield a problem for each entry of the run folder that prevents a run from writing there.

    These are symlinks, whose target would be written, files with the name of a folder, and folders with the name of a
    file.
    """
    run_folder = Path(loaded.config.job.dump_folder).absolute()
    checkpoint = loaded.config.checkpoint
    saves = checkpoint.enable and not checkpoint.load_only and "://" not in checkpoint.folder
    # Collect the folders that this run would write to. Each has an option, and True if the run is sure to write there.
    written = {}
    for option, enabled_by in BELOW_DUMP_FOLDER.items():
        path = run_folder / (loaded.value(option) or "")
        if option.endswith("_file"):
            path = path.parent
        if saves or option != "checkpoint.folder":
            written[path] = option, bool(loaded.value(enabled_by))
    written.setdefault(run_folder / "logs", ("job.dump_folder", True))
    for name, enabled_by in FOLDERS_OF_LIBRARIES.items():
        written[run_folder / name] = "job.dump_folder", bool(loaded.value(enabled_by))

    # Links above the run folder are allowed, because the user chose that path.
    for path, (option, is_certain) in written.items():
        for folder in (path, *path.parents):
            if folder == run_folder or not folder.is_relative_to(run_folder):
                continue
            if os.path.islink(folder):
                rule = f"leads through {folder}, a link to {os.readlink(folder)}, which a run does not follow"
                elsewhere = "use another folder"
                if option in ALSO_ELSEWHERE and _may_lead_to_folder(folder):
                    elsewhere = f"set {option} to {os.path.realpath(folder)}"
                yield problem(loaded, option, rule, f"remove the link, or {elsewhere}")
            elif is_certain and os.path.exists(folder) and not os.path.isdir(folder):
                rule = f"leads through {folder}, which is not a folder"
                yield problem(loaded, option, rule, "rename the file, or use another folder")
    for name in filter(None, (*FILES_OF_A_RUN, loaded.config.job.save_config_file)):
        if os.path.isdir(run_folder / name):
            rule = f"contains a folder {name}, but a run writes a file with this name"
            yield problem(
                loaded, "job.dump_folder", rule, "rename the folder, or use another job.dump_folder"
            )


def _may_lead_to_folder(link: Path) -> bool:
    """True if the target of a link is a folder or does not exist. A link to itself has no target."""
    try:
        return stat.S_ISDIR(os.stat(link).st_mode)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _why_not_writable(path: Path) -> str:
    """Return the reason why a folder cannot be created or written.

    Empty if the folder is writable, or if the storage returns another error.
    """
    try:
        # Let the system check the length of the longest path of a run. The path need not exist.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(path / _LONGEST_BELOW)
        # Check the deepest existing ancestor. A dangling link counts as existing, but is not a folder.
        ancestor = path
        while not ancestor.exists() and not ancestor.is_symlink():
            ancestor = ancestor.parent
        if not ancestor.exists():
            return f"cannot be made: {ancestor} is a link to nothing"
        if not ancestor.is_dir():
            return f"cannot be made: {ancestor} is a file"
        is_read_only = hasattr(os, "statvfs") and bool(os.statvfs(ancestor).f_flag & os.ST_RDONLY)
        # A folder with files was writable before. Its file system is read-only after an error of the disk, or for a
        # moment. That is a storage error, after which the same command is tried again, and the first write reports it.
        if is_read_only and ancestor == path and any(path.iterdir()):
            return ""
        # Folders cannot be created in /proc and /sys, even if their permissions allow it.
        in_virtual_files = ancestor.is_relative_to("/proc") or ancestor.is_relative_to("/sys")
        is_virtual = ancestor != path and in_virtual_files
        if not os.access(ancestor, os.W_OK | os.X_OK) or is_read_only or is_virtual:
            return f"cannot be written: {ancestor} is not writable here"
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return "is longer than the file system allows"
        return ""
    return ""


_ABSENT = ("does not exist", "correct the path")
_FETCH_MODEL = "or download the model (shardtrain data download --repo_id OWNER/NAME --all)"
_LONGEST_BELOW = "checkpoint/step-1000000.tmp-0123456789ab/.rank-00000.bin.01234567.tmp"
"""Example of the longest path inside a run folder, used to check the system's limit on path length."""


def _is_pattern(path: str) -> bool:
    return any(mark in path for mark in "*?[")


def _found(path: str, on_hub: bool) -> bool:
    """True if a dataset's path matches a file. URLs and names on the hub are not checked."""
    if "://" in path or _exists(path):
        return True
    if _is_pattern(path) and glob.glob(os.path.expanduser(path), recursive=True):
        return True
    # A repository of the hub: NAME or OWNER/NAME.
    is_repository = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is not None and not path.startswith(
        "."
    )
    return on_hub and is_repository


def _exists(path: str) -> bool:
    return Path(path).expanduser().exists()


def _tokenizer(loaded: Loaded) -> Iterator[Problem]:
    """Check that the tokenizer exists and its number of ids does not exceed the model's vocab_size."""
    model = loaded.config.model
    option = "model.hf_assets_path"
    if model.tokenizer_path:
        option = "model.tokenizer_path"
    value = str(loaded.value(option))
    sizes = model_shape(loaded) or {}
    vocab = sizes.get("vocab_size")
    if value == "bytes":
        if isinstance(vocab, int) and vocab < BYTE_TOKENIZER_IDS:
            yield problem(
                loaded,
                option,
                rule=f"has {BYTE_TOKENIZER_IDS} ids, more than the model's vocab_size of {vocab}",
                fix=f"set model.overrides.vocab_size to {BYTE_TOKENIZER_IDS} or more",
            )
        return
    if model.tokenizer_path and value.endswith(".py"):
        # The user's code is not executed here. The trainer compares its ids with the model's.
        return
    path = tokenizer_folder(value)
    fix = 'download the tokenizer of the model\'s Hugging Face repository ("shardtrain data download"), or use "bytes"'
    if not path.exists():
        if option == "model.hf_assets_path" and loaded.config.checkpoint.initial_load_in_hf:
            # The folder is that of a pretrained model, which a tokenizer cannot replace.
            fix = _FETCH_MODEL
        yield problem(loaded, option, "does not exist", f"correct the path, {fix}")
        return
    # In a folder, tokenizer.json takes precedence.
    files = [path]
    rule = "is not a .json or .model file"
    if path.is_dir():
        files = [path / "tokenizer.json", path / "tokenizer.model"]
        rule = "holds no tokenizer.json or tokenizer.model"
    files = [file for file in files if file.is_file() and file.suffix in (".json", ".model")]
    if not files:
        yield problem(loaded, option, rule, fix)
        return
    file = files[0]
    if file.suffix == ".model":
        # Counting the ids requires the tokenizer's library. The trainer compares them with the model's.
        return
    ids = _count_ids(file)
    if ids is None:
        yield problem(loaded, option, "has a tokenizer.json that cannot be read", fix)
    elif isinstance(vocab, int) and ids > vocab:
        yield problem(
            loaded,
            option,
            rule=f"has {ids} ids, more than the model's vocab_size of {vocab}",
            fix=f"set model.overrides.vocab_size to {ids} or more",
        )


def _count_ids(file: Path) -> int | None:
    """Return the largest id of a tokenizer.json plus one, or None if it cannot be read."""
    try:
        content: Any = checked_json.parse(
            bounded_reads.read_all(file, _MOST_TOKENIZER_BYTES),
            memory_bytes=checked_json.LARGE_MEMORY_BYTES,
        )
        # WordPiece and BPE map pieces to ids. Unigram lists its pieces in the order of the ids.
        vocab = content["model"]["vocab"]
        ids = list(range(len(vocab)))
        if isinstance(vocab, dict):
            ids = list(vocab.values())
        ids += [token["id"] for token in content.get("added_tokens", [])]
        return max(ids) + 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _packages(loaded: Loaded) -> Iterator[Problem]:
    """Check that the optional packages of the configured features are installed."""
    # option -> the module to import, and the name that pip installs
    packages = {
        "metrics.enable_wandb": ("wandb", "wandb"),
        "metrics.enable_tensorboard": ("tensorboard", "tensorboard"),
        "metrics.enable_mlflow": ("mlflow", "mlflow-skinny"),
        "metrics.enable_trackio": ("trackio", "trackio"),
        "metrics.prometheus_port": ("prometheus_client", "prometheus_client"),
    }
    needed = [(option, *names) for option, names in packages.items() if loaded.value(option)]
    flash_attention = loaded.config.training.flash_attention
    if flash_attention == "FA3":
        needed.append(("training.flash_attention", "flash_attn_interface", "flash-attn-3"))
    elif flash_attention == "FA4":
        needed.append(("training.flash_attention", "flash_attn", "flash-attn-4"))
    for option, module, name in needed:
        if importlib.util.find_spec(module) is None:
            rule = f"needs the package {name}"
            yield problem(loaded, option, rule, f"run `pip install {name}`, or turn it off")
