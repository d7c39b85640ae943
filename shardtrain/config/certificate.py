"""Certificates of ``shardtrain verify``: read and write the file, and find what changed since it was written.

A certificate proves that the numbers of a configuration do not depend on how it runs. ``train`` reads the
file, too, so this module belongs to the core. It does not import torch.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardtrain import __version__
from shardtrain.config import ramps
from shardtrain.config.changes import class_of, file_hashes, json_value, show_value
from shardtrain.config.load import Loaded, value_of
from shardtrain.config.options import options
from shardtrain.config.schema import Config
from shardtrain.utils import atomic_io, bounded_reads, checked_json, storage_errors
from shardtrain.utils.errors import ConfigError, Problem, StorageError
from shardtrain.utils.processor import processor_name

OPTION = "job.certificate"
FORMAT = "shardtrain.certificate/1"
MAX_BYTES = 4 * 2**20
MAX_HASHED_BYTES = 64 * 2**20
"""Larger data files are identified by size and time of modification, so a check takes a second."""
MAX_LISTED_FILES = 1000
CHECKSUM = "content_sha256"
AXES = {
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
}
"""Mesh axis -> its option. Degrees may change freely, but an axis must have been compared."""
_HOW_SECTIONS = ("parallelism.", "activation_checkpoint.", "compile.")
_FREE = {
    *AXES.values(),
    "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.expert_tensor_parallel_degree",
    "training.steps",
    "training.epochs",
}
"""Options that may change: numbers of ranks, and the length of a run."""
_BATCH = ("training.global_batch_size", "training.local_batch_size")
_PATHS = (
    "model.hf_assets_path",
    "model.tokenizer_path",
    "training.dataset_path",
    "validation.dataset_path",
    "data.chat_template",
    "task.teacher_path",
    "task.reference_path",
    "checkpoint.initial_load_path",
    "lora.initial_load_path",
)
"""Options that name files or folders of the run's inputs."""
_PYTHON_FILES = ("training.dataset", "validation.dataset")
"""Options that may name a Python file of the user, which a resume does not compare."""
_ALSO_RECORDED = ("validation.enable", "training.nonfinite_policy")
"""Options that a resume ignores, but that decide which dimensions a certificate has."""


@dataclasses.dataclass(frozen=True)
class CertificateState:
    """Result of checking a certificate against a configuration and this installation.

    Attributes:
        path: The file.
        sha256: SHA-256 of the file.
        holds: True if every requested dimension was checked and holds.
        date: UTC time at which it was written.
        changes: Differences since then, one line each.
    """

    path: str
    sha256: str
    holds: bool
    date: str
    changes: Sequence[str]

    @property
    def applies(self) -> bool:
        """True if the certificate holds and nothing has changed."""
        return self.holds and not self.changes

    def __str__(self) -> str:
        """One line: ``certificate.json (sha256 0123456789ab, 2026-11-28) applies``."""
        start = f"{self.path} (sha256 {self.sha256[:12]}, {self.date[:10]})"
        if self.applies:
            return f"{start} applies"
        if not self.holds:
            return f"{start} records that a number differs or was not checked"
        more = f" and {len(self.changes) - 3} more" if len(self.changes) > 3 else ""
        return f"{start} does not apply: {'; '.join(self.changes[:3])}{more}"


def facts_of(loaded: Loaded) -> dict[str, Any]:
    """Return everything that must be unchanged for a certificate to apply: options, files, code and versions."""
    config = loaded.config
    record = configuration_record(config)
    return {
        "configuration": record,
        "configuration_sha256": _sha256(_canonical(record)),
        "axes": axes_in_use(config),
        "files": {**file_hashes(config), **_input_files(config)},
        "versions": _versions(),
        "code_sha256": _code_hash(),
    }


def configuration_record(config: Config) -> dict[str, Any]:
    """Return the options, as JSON, that change numbers or were varied when the certificate was written."""
    record = {}
    for name in options(type(config)):
        is_how = name.startswith(_HOW_SECTIONS)
        is_recorded = is_how or name in _ALSO_RECORDED or class_of(name) != "ignore"
        if name not in _FREE and is_recorded:
            record[name] = json_value(value_of(config, name))
    # Without a global batch size, the size of a micro-batch determines the rows of a step.
    if not ramps.batch_sizes(config.training):
        record["training.local_batch_size"] = config.training.local_batch_size
    return record


def axes_in_use(config: Config) -> list[str]:
    """Return the mesh axes that a configuration uses. The shard degree -1 counts as used."""
    return [axis for axis, option in AXES.items() if value_of(config, option) not in (0, 1)]


def hardware() -> dict[str, Any]:
    """Describe this machine. A certificate also applies to others, because the file only records it."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "machine": platform.machine(),
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_bytes,
        "system": f"{platform.system()} {platform.release()}",
    }


def commit() -> str:
    """Return the git commit of this checkout of the package, or "" for an installed package."""
    checkout = Path(__file__).resolve().parents[2]
    # The package may be installed inside another repository, so look for .git exactly here.
    if not (checkout / ".git").exists():
        return ""
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip()


def write(path: str, document: Mapping[str, Any]) -> None:
    """Write a certificate atomically, with a checksum of its content."""
    content = {**document, CHECKSUM: _sha256(_canonical(document))}
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    with storage_errors.writing(Path(path).parent, "name another file"):
        atomic_io.write(path, text, durable=True, create_folder=True)


def require_writable(path: str, option: str) -> None:
    """Raise ConfigError if a certificate cannot be written to ``path``, before minutes of work."""
    if os.path.isdir(path):
        raise ConfigError(Problem(option, path, "is a folder", "name a file", "command line"))
    # The folder is created when the file is written, so check the first parent that exists.
    parent = Path(os.path.abspath(path)).parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        rule = f"cannot be written: {parent} is not a folder that you can write to"
        raise ConfigError(Problem(option, path, rule, "name another file", "command line"))


def read(path: str, option: str) -> tuple[dict[str, Any], str]:
    """Return the content of a certificate and the SHA-256 of its file.

    Raises:
        ConfigError: the file does not exist, is not a certificate, or is damaged.
        StorageError: the storage does not answer.
    """
    try:
        data = bounded_reads.read_all(path, MAX_BYTES)
    except OSError as error:
        raise bounded_reads.unreadable(
            option, path, error, "write it with shardtrain verify --certificate"
        ) from error
    try:
        document = checked_json.parse(data, unique_keys=True)
    except (ValueError, RecursionError) as error:
        raise _not_a_certificate(option, path, "is not JSON") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _not_a_certificate(
            option, path, f'is not a certificate: its "format" is not "{FORMAT}"'
        )
    checksum = document.pop(CHECKSUM, None)
    if checksum != _sha256(_canonical(document)):
        raise _not_a_certificate(
            option, path, "is damaged or was edited: its checksum does not match its content"
        )
    # Check the structure too. The checksum protects against damage,
    # but another program may have written the file.
    if not _has_structure(document):
        raise _not_a_certificate(
            option, path, "lacks a part of a certificate, or has one of another type"
        )
    return document, _sha256(data)


def check(path: str, loaded: Loaded, option: str) -> CertificateState:
    """Compare a certificate with a configuration and this installation. Raises what ``read`` raises."""
    document, sha256 = read(path, option)
    changes = tuple(_changes(document, facts_of(loaded)))
    return CertificateState(path, sha256, document["holds"], document["date"], changes)


def problem_of(loaded: Loaded) -> Problem | None:
    """Return the problem of a ``job.certificate`` that cannot be read. One that does not apply is no problem."""
    path = loaded.config.job.certificate
    if path is None:
        return None
    try:
        read(path, OPTION)
    except ConfigError as error:
        (problem,) = error.problems
        assert isinstance(problem, Problem)
        return dataclasses.replace(problem, where=loaded.where(OPTION))
    except StorageError as error:
        return Problem(
            OPTION, path, f"cannot be read ({error})", "try again later", loaded.where(OPTION)
        )
    return None


def of_run(loaded: Loaded) -> CertificateState | None:
    """Return the state of ``job.certificate``, or None if the option is not set. Raises what ``read`` raises."""
    path = loaded.config.job.certificate
    return None if path is None else check(path, loaded, OPTION)


def _not_a_certificate(option: str, path: str, rule: str) -> ConfigError:
    return ConfigError(
        Problem(option, path, rule, "write it again with shardtrain verify --certificate")
    )


def _has_structure(document: Mapping[str, Any]) -> bool:
    """True if the parts that ``check`` reads have the right types."""
    tables = all(
        isinstance(document.get(name), dict) for name in ("configuration", "files", "versions")
    )
    texts = all(
        isinstance(document.get(name), str)
        for name in ("date", "code_sha256", "configuration_sha256")
    )
    axes = document.get("compared_axes")
    is_list = isinstance(axes, list) and all(isinstance(axis, str) for axis in axes)
    return tables and texts and is_list and isinstance(document.get("holds"), bool)


def _changes(document: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield one line for each difference between a certificate and the current facts."""
    before = document["configuration"]
    for name in sorted({*before, *now["configuration"]}):
        old = before.get(name)
        new = now["configuration"].get(name)
        # Without a global batch size, rows per step follow from the ranks,
        # and a resumed run keeps their number.
        was_automatic = before.get(_BATCH[0]) == -1
        is_automatic = now["configuration"][_BATCH[0]] == -1
        if name in _BATCH and was_automatic and not is_automatic:
            continue
        if old != new:
            yield f"{name}: {show_value(old)} -> {show_value(new)}"
    for axis in now["axes"]:
        # Compare the axes in use, not degrees: the default shard degree of -1 may result in one process,
        # which uses no axis.
        if axis not in document["compared_axes"]:
            yield f"{AXES[axis]}: the axis {axis} was not compared"
    for name in sorted({*document["files"], *now["files"]}):
        if document["files"].get(name) != now["files"].get(name):
            yield f"{name}: the file or folder has other contents"
    for name in sorted({*document["versions"], *now["versions"]}):
        old = document["versions"].get(name)
        new = now["versions"].get(name)
        if old != new:
            yield f"version of {name}: {show_value(old)} -> {show_value(new)}"
    if document["code_sha256"] != now["code_sha256"]:
        yield "the code of shardtrain has changed"


def _versions() -> dict[str, str | None]:
    """Return versions of the packages that compute numbers. Reading metadata does not import them."""
    versions: dict[str, str | None] = {
        "shardtrain": __version__,
        "python": platform.python_version(),
    }
    for name in ("torch", "transformers", "tokenizers"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _code_hash() -> str:
    """Return the SHA-256 of the package's Python files, without the files that a run does not use."""
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        is_unused = name.startswith(("tools/", "compat/", "launch/platforms/"))
        # This file reads weights of older systems, also in a run.
        if not is_unused or name == "compat/layer_files.py":
            digest.update(f"{name}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _input_files(config: Config) -> dict[str, str]:
    """Return a fingerprint of each file or folder that the configuration names as an input, by option."""
    named = {name: value_of(config, name) for name in _PATHS}
    for source, options_of_source in config.data.sources.items():
        named[f"data.sources.{source}.dataset_path"] = options_of_source.dataset_path
    for name in _PYTHON_FILES:
        dataset = value_of(config, name)
        if isinstance(dataset, str) and dataset.endswith(".py"):
            named[name] = dataset
    fingerprints = {}
    for name, path in named.items():
        if isinstance(path, str):
            # The path of data may be a pattern such as "rows/*.jsonl".
            paths = [path] if os.path.exists(path) else sorted(glob.glob(path, recursive=True))
            if paths:
                fingerprints[name] = _fingerprint_of_files(paths)
    return fingerprints


def _fingerprint_of_files(paths: Sequence[str]) -> str:
    """Return the SHA-256 of a file, or of the fingerprints of several files and of the files below folders.

    If there are more than ``MAX_LISTED_FILES``, only the first files are read, and the rest is counted.
    """
    if len(paths) == 1 and os.path.isfile(paths[0]):
        return _fingerprint_of_file(Path(paths[0]))
    files: list[Path] = []
    for path in paths:
        files += (
            [entry for entry in Path(path).rglob("*") if entry.is_file()]
            if os.path.isdir(path)
            else [Path(path)]
        )
    listed = [
        f"{file.as_posix()} {_fingerprint_of_file(file)}"
        for file in sorted(files)[:MAX_LISTED_FILES]
    ]
    return _sha256(_canonical([len(files), *listed]))


def _fingerprint_of_file(path: Path) -> str:
    status = path.stat()
    if status.st_size > MAX_HASHED_BYTES:
        return f"size {status.st_size}, modified {status.st_mtime_ns}"
    try:
        return _sha256(bounded_reads.read_all(path, MAX_HASHED_BYTES))
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
