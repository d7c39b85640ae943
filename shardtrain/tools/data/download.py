"""``shardtrain data download``: tokenizer, configuration and weights of a Hugging Face repository.

``huggingface_hub`` sends the requests, so proxies, tokens, offline mode, retries, its cache and Xet storage
work as usual. This verb adds what a training run needs: all files are from one commit, the hash of a file is
checked before the file gets its final name, and waiting has a time limit.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from shardtrain.tools.hub_client import Hub, expected_hash, hash_of_file, refuse_token
from shardtrain.utils import atomic_io, output_target, storage_errors
from shardtrain.utils.arguments import StrictArgumentParser
from shardtrain.utils.errors import ConfigError, DataError, Problem, StorageError
from shardtrain.utils.heartbeat import heartbeat
from shardtrain.utils.redact import visible
from shardtrain.utils.units import format_bytes

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

PROGRAM = "shardtrain data download"
ASSETS: dict[str, tuple[str, ...]] = {
    "tokenizer": (
        "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
        "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "additional_chat_templates/*.jinja",
    ),
    "config": ("config.json", "generation_config.json"),
    "index": ("*.safetensors.index.json",),
    "safetensors": ("*.safetensors",),
}  # fmt: skip
"""Names of the files that each kind of asset has, at the top of a repository."""
STAGING = ".download"
"""Folder within the target.

It has the files that are not complete and checked yet, and is removed at the end.
"""


def main(arguments: list[str]) -> int:
    """Run ``shardtrain data download`` and return its exit status.

    Raises:
        ConfigError: an option is wrong, or the repository does not exist or is not readable.
        DataError: a downloaded file differs from the size or hash that the hub reports.
        StorageError: the hub cannot be reached, or a file cannot be written.
    """
    refuse_token(arguments, PROGRAM)
    options = _parser().read(arguments)
    kinds = ASSETS if options.all else options.assets
    options.assets = list(dict.fromkeys(kinds))  # each once
    if options.tokenizer_path and options.assets != ["tokenizer"]:
        raise ConfigError(
            Problem(
                "--tokenizer_path",
                options.tokenizer_path,
                rule="can only be combined with --assets tokenizer",
                fix="remove it",
            )
        )
    # All files are downloaded from this commit, even if the repository changes meanwhile.
    hub = Hub(options.repo_id, options.revision)
    with heartbeat(f"asking {hub.endpoint}"):
        commit, files = hub.files()
    if options.tokenizer_path is None:
        folder = Path(options.local_dir or "assets/hf") / options.repo_id.rpartition("/")[2]
    else:
        folder = Path(options.local_dir or "assets/tokenizer")
    names = _choose(options, list(files))
    print(f"{options.repo_id} at {commit}: {len(names)} files to {folder}", flush=True)
    try:
        missing = {}
        for name in names:
            if _is_complete(folder / name, name, files[name]):
                print(visible(f"{name}: exists already", lines=False), flush=True)
            else:
                missing[name] = files[name]
        if missing:
            _download(hub, commit, missing, folder)
    except OSError as error:
        raise storage_errors.cannot("write", folder, error, "name another --local_dir") from error
    return 0


def _is_complete(path: Path, name: str, facts: RepoSibling) -> bool:
    """True if a file exists with the hash that the hub reports.

    A file without a known hash is downloaded again.
    """
    expected = expected_hash(facts)
    if not expected or not path.is_file():
        return False
    kind, value = expected
    with heartbeat(f"reading {name}"):
        return hash_of_file(path, kind) == value


def _download(hub: Hub, commit: str, files: Mapping[str, RepoSibling], folder: Path) -> None:
    """Download files to a folder. Raise StorageError if the disk has too little space for them."""
    folder.mkdir(parents=True, exist_ok=True)
    num_bytes = sum(facts.size or 0 for facts in files.values())
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise StorageError(
            f"{folder} has {format_bytes(free)} free, but the files need "
            f"{format_bytes(num_bytes)}; free some space or name another --local_dir"
        )
    # On a terminal, huggingface_hub shows a progress bar instead.
    heartbeat_seconds = 0 if sys.stderr.isatty() else None
    with _staging(folder) as staging:
        for name, facts in files.items():
            with heartbeat(f"fetching {name}", heartbeat_seconds):
                line = fetch(hub, name, commit, facts, staging, folder / name)
            print(visible(line, lines=False), flush=True)


def fetch(hub: Hub, name: str, commit: str, facts: RepoSibling, staging: Path, target: Path) -> str:
    """Download one file and check its hash. Return a line about it.

    The file is downloaded to ``staging``, on the same file system, and replaces ``target`` atomically.

    Raises:
        DataError: the hash is wrong after two downloads.
        OSError: the file cannot be moved.
        ConfigError, StorageError: as ``Hub.download``.
    """
    path = hub.download(name, commit, staging)
    note = ", no hash known"
    expected = expected_hash(facts)
    if expected:
        note = ""
        kind, value = expected
        if hash_of_file(path, kind) != value:
            # A file in the library's cache may be damaged, so download again without the cache.
            path.unlink()
            path = hub.download(name, commit, staging, force=True)
            actual = hash_of_file(path, kind)
            if actual != value:
                raise DataError(
                    f"{name} has the hash {actual} instead of {value}; it was deleted, try again"
                )
    size = path.stat().st_size
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(path, target)
    return f"{name}: {format_bytes(size)}{note}"


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Create a folder that one process at a time can use. After most errors it stays, so downloads can be resumed.

    Raises:
        ConfigError: another process uses it.
    """
    staging = folder / STAGING
    staging.mkdir(exist_ok=True)
    # NFS only locks files that are open for writing.
    with open(staging / ".lock", "a", opener=atomic_io.open_file) as lock:
        # Another process has the lock, or has just removed the file with its folder. In the second
        # case the lock would be useless, because no other process can open the removed file.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name)):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            raise ConfigError(
                Problem(
                    "--local_dir",
                    str(folder),
                    rule="is being written by another process",
                    fix="wait until it ends",
                )
            ) from None
        try:
            yield staging
        except DataError:
            # Never resume from wrong data.
            shutil.rmtree(staging, ignore_errors=True)
            raise
        shutil.rmtree(staging, ignore_errors=True)


def _choose(options: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Return the names of the files of the requested kinds.

    Raises:
        ConfigError: the repository has no file of a kind, or a file with an unsafe name.
    """
    # The names are untrusted: they must not write outside of the target folder.
    for name in names:
        path = PurePosixPath(name)
        is_outside = path.is_absolute() or ".." in path.parts or not path.parts
        if is_outside or "\\" in name or "\0" in name:
            raise ConfigError(
                Problem(
                    "--repo_id",
                    options.repo_id,
                    rule=f"has a file named {name[:80]!r}, which is outside of its folder",
                    fix="do not use this repository",
                )
            )

    # Find the files of each kind in the folder of the repository.
    prefix = ""
    if options.tokenizer_path:
        prefix = options.tokenizer_path.strip("/") + "/"
    chosen: dict[str, None] = {}
    for kind in options.assets:
        matching = []
        for name in names:
            if name.startswith(prefix) and _matches(name.removeprefix(prefix), ASSETS[kind]):
                matching.append(name)
        # A model in one file needs no index.
        if kind == "index" and not matching and "model.safetensors" in names:
            print("index: none, the weights are one file")
        elif not matching:
            raise _no_file(options, kind, prefix, names)
        chosen |= dict.fromkeys(sorted(matching))
    return list(chosen)


def _no_file(
    options: argparse.Namespace, kind: str, prefix: str, names: Sequence[str]
) -> ConfigError:
    where = f"{options.repo_id}/{prefix}".rstrip("/")
    some_names = ", ".join(sorted(names)[:8]) or "no files"
    if len(names) > 8:
        some_names += ", ..."
    return ConfigError(
        Problem(
            "--assets",
            kind,
            rule=f"matches no file of {where}, which has {some_names}",
            fix="check --repo_id, or request other assets",
        )
    )


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """True if a name matches one of the patterns. A ``*`` does not match a slash."""
    for pattern in patterns:
        has_same_depth = pattern.count("/") == name.count("/")
        if has_same_depth and fnmatch.fnmatchcase(name, pattern):
            return True
    return False


def _parser() -> StrictArgumentParser:
    parser = StrictArgumentParser(
        PROGRAM,
        "Download files of a Hugging Face repository with huggingface_hub, "
        "which reads the environment: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE, HTTPS_PROXY.",
        f"{PROGRAM} --repo_id meta-llama/Llama-3.1-8B --assets tokenizer",
        first="--repo_id",
    )
    parser.add_argument(
        "--repo_id", required=True, metavar="ORG/NAME", help="e.g. meta-llama/Llama-3.1-8B"
    )
    kinds = ", ".join(ASSETS)
    parser.add_argument(
        "--assets",
        nargs="+",
        default=["tokenizer"],
        choices=tuple(ASSETS),
        help=f"kinds: {kinds}",
    )
    parser.add_argument("--all", action="store_true", help="download all kinds of assets")
    parser.add_argument(
        "--local_dir",
        type=output_target.folder_argument,
        metavar="DIR",
        help="the files go to DIR/NAME (assets/hf)",
    )
    parser.add_argument("--tokenizer_path", metavar="FOLDER", help="folder of the tokenizer in the repository (a name "
                        "from torchtitan of 2024); the files then go to DIR/FOLDER (assets/tokenizer)")  # fmt: skip
    parser.add_argument("--revision", default="main", help="branch, tag or commit (main)")
    return parser
