"""Weights of old, ``pytorch_model.bin``, as safetensors: by ``shardtrain import --legacy_bin``.

Each file is read by a process of its own (``legacy_child.py``) that has none of this one's environment, and bounds on
its time, its memory and what it writes. What it leaves is read as any other folder, with all its checks.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from shardtrain.hf.config_json import CONFIG, read_json
from shardtrain.hf.source import of_folder
from shardtrain.hf.weights import INDEX, SINGLE
from shardtrain.utils.errors import CheckpointError, ConfigError, StorageError

BIN = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
_BASE_BYTES = 16 * 2**30
"""Address space that PyTorch itself reserves."""
_BASE_SECONDS = 120
"""Time that PyTorch may need to start on a busy machine."""
_SLOWEST_BYTES_PER_SECOND = 10 * 2**20
_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "SYSTEMROOT")
"""What of the environment a process needs to find Python and its packages: no token, no proxy."""


@contextlib.contextmanager
def as_safetensors(folder: Path, beside: Path) -> Iterator[Path]:
    """A folder with the same files beside the weights, and these as safetensors, which is there within the block.

    It is written next to ``beside``, and needs as much room as the weights.

    Raises:
        ConfigError: when the folder has safetensors, which need no such thing.
        CheckpointError: when a file is missing, no file of tensors alone, or goes beyond its bounds.
        StorageError: when there is no room.
    """
    from safetensors import SafetensorError, safe_open

    if (folder / SINGLE).exists() or (folder / INDEX).exists():
        raise ConfigError(f"--legacy_bin: {folder} has safetensors, which need no pickle; leave it out")
    names = _bin_files(folder)
    temporary = beside.with_name(f"{beside.name}.bin-{secrets.token_hex(6)}")
    try:
        temporary.mkdir(parents=True)
        shutil.copyfile(folder / CONFIG, temporary / CONFIG)
        for name in of_folder(folder).files:
            (temporary / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, temporary / name)
        files = [f"model-{number:05d}-of-{len(names):05d}.safetensors" for number in range(1, len(names) + 1)]
        for name, file in zip(names, files, strict=True):
            _convert(folder / name, temporary / file)

        # An index, as any folder of several files has one; a file that was cut short shows here
        weight_map: dict[str, str] = {}
        for file in files:
            try:
                with safe_open(str(temporary / file), framework="pt") as opened:
                    weight_map |= dict.fromkeys(opened.keys(), file)
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{temporary / file} was not written whole ({error}); start again") from None
        (temporary / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        yield temporary
    except OSError as error:
        raise StorageError(f"cannot write {error.filename}: {error.strerror}; choose another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _bin_files(folder: Path) -> list[str]:
    """The files of weights, by their index if there is one."""
    if not (folder / BIN_INDEX).exists():
        if not (folder / BIN).is_file():
            raise CheckpointError(f"{folder} has neither {BIN} nor {BIN_INDEX}; name the folder that holds them")
        return [BIN]
    named = read_json(folder / BIN_INDEX).get("weight_map")
    if not isinstance(named, dict) or not named:
        raise CheckpointError(f"{folder / BIN_INDEX}: weight_map is not a table of names")
    for file in named.values():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".bin"):
            raise CheckpointError(f"{folder / BIN_INDEX} names {file!r}, which is not a .bin file of this folder")
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file} is missing; {BIN_INDEX} names it")
    return sorted(set(named.values()))


def _convert(source: Path, target: Path) -> None:
    size = source.stat().st_size
    seconds = _BASE_SECONDS + size // _SLOWEST_BYTES_PER_SECOND

    # Set in the child, between fork and exec. A file is mapped, and its largest tensor may be copied once
    def bound() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (_BASE_BYTES + 2 * size,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_FSIZE, (2 * size + 2**20,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    command = [sys.executable, "-P", "-m", "shardtrain.hf.legacy_child", str(source.resolve()), str(target.resolve())]
    environment = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command,
            env=environment,
            cwd=target.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=seconds,
            preexec_fn=bound,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CheckpointError(f"{source} was not read within {seconds} s, which no such file needs") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = "".join(c if c.isprintable() else "?" for c in lines[-1])[:300] if lines else "it ended"
        raise CheckpointError(
            f"{source} is not a file of tensors alone that can be mapped ({reason}; status {done.returncode}); nothing "
            "in it was run: get the safetensors of this model, or save it so with the program that wrote it"
        )
