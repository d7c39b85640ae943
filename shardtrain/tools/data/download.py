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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from shardtrain.tools.hub_client import Hub, expected_hash, hash_of_file, refuse_token
from shardtrain.utils import atomic_io, storage_errors
from shardtrain.utils.arguments import StrictArgumentParser, output_name
from shardtrain.utils.errors import ConfigError, DataError, Problem, StorageError
from shardtrain.utils.heartbeat import heartbeat
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
"""Folder within the target. It has the files that are not complete and checked yet, and is removed at the end."""


def main(words: list[str]) -> int:
    """Run ``shardtrain data download`` and return its exit status.

    Raises:
        ConfigError: an option is wrong, or the repository does not exist or is not readable.
        DataError: a downloaded file differs from the size or hash that the hub reports.
        StorageError: the hub cannot be reached, or a file cannot be written.
    """
    refuse_token(words, PROGRAM)
    options = _parser().read(words)
    options.assets = list(dict.fromkeys(ASSETS if options.all else options.assets))
    if options.tokenizer_path and options.assets != ["tokenizer"]:
        raise ConfigError(
            Problem(
                "--tokenizer_path",
                options.tokenizer_path,
                rule="can only be combined with --assets tokenizer",
                fix="remove it",
            )
        )
    hub = Hub(options.repo_id, options.revision)
    with heartbeat(f"asking {hub.endpoint}"):
        commit, files = hub.files()
    folder = Path(options.local_dir or ("assets/tokenizer" if options.tokenizer_path is not None else "assets/hf"))
    if options.tokenizer_path is None:
        folder = folder / options.repo_id.rpartition("/")[2]
    names = _choose(options, list(files))
    print(f"{options.repo_id} at {commit}: {len(names)} files to {folder}", flush=True)
    try:
        # Keep existing files whose hash matches the hub's.
        missing = []
        for name in names:
            expected = expected_hash(files[name])
            with heartbeat(f"reading {name}"):
                is_there = (
                    expected and (folder / name).is_file() and hash_of_file(folder / name, expected[0]) == expected[1]
                )
            if is_there:
                print(f"{name}: exists already", flush=True)
            else:
                missing.append(name)

        if missing:
            folder.mkdir(parents=True, exist_ok=True)
            num_bytes = sum(files[name].size or 0 for name in missing)
            free = shutil.disk_usage(folder).free
            if num_bytes > free:
                raise StorageError(
                    f"{folder} has {format_bytes(free)} free, but the files need "
                    f"{format_bytes(num_bytes)}; free some space or name another --local_dir"
                )
            with _staging(folder) as staging:
                for name in missing:
                    # On a terminal, huggingface_hub shows a progress bar.
                    with heartbeat(f"fetching {name}", 0 if sys.stderr.isatty() else None):
                        done = fetch(hub, name, commit, files[name], staging, folder / name)
                    print(done, flush=True)
    except OSError as error:
        raise storage_errors.cannot("write", folder, error, "name another --local_dir") from error
    return 0


def fetch(hub: Hub, name: str, commit: str, facts: RepoSibling, staging: Path, target: Path) -> str:
    """Download one file and check its hash. Return a line about it.

    The file is downloaded to ``staging``, on the same file system, and replaces ``target`` atomically.

    Raises:
        DataError: the hash is wrong after two downloads.
        OSError: the file cannot be moved.
        ConfigError, StorageError: as ``Hub.download``.
    """
    expected = expected_hash(facts)
    path = hub.download(name, commit, staging)
    if expected and hash_of_file(path, expected[0]) != expected[1]:
        # A file in the library's cache may be damaged, so download again without the cache.
        path.unlink()
        path = hub.download(name, commit, staging, force=True)
        found = hash_of_file(path, expected[0])
        if found != expected[1]:
            raise DataError(f"{name} has the hash {found} instead of {expected[1]}; it was deleted, try again")
    target.parent.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size
    os.replace(path, target)
    return f"{name}: {format_bytes(size)}{'' if expected else ', no hash known'}"


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """Create a folder that one process at a time can use. After most errors it stays, so downloads can be resumed.

    Raises:
        ConfigError: another process uses it.
    """
    staging = folder / STAGING
    staging.mkdir(exist_ok=True)
    with open(staging / ".lock", "a", opener=atomic_io.open_file) as lock:  # NFS locks only what is open for writing
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
            shutil.rmtree(staging, ignore_errors=True)  # do not resume from wrong data
            raise
        shutil.rmtree(staging, ignore_errors=True)


def _choose(options: argparse.Namespace, known: Sequence[str]) -> list[str]:
    """Return the names of the files of the requested kinds.

    Raises:
        ConfigError: the repository has no file of a kind, or a file with an unsafe name.
    """
    for name in known:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or not path.parts:
            raise ConfigError(
                Problem(
                    "--repo_id",
                    options.repo_id,
                    rule=f"has a file named {name[:80]!r}, which is outside of its folder",
                    fix="do not use this repository",
                )
            )
    below = f"{options.tokenizer_path.strip('/')}/" if options.tokenizer_path else ""
    chosen: dict[str, None] = {}
    for kind in options.assets:
        found = [name for name in known if _matches(name.removeprefix(below), ASSETS[kind]) and name.startswith(below)]
        if kind == "index" and not found and "model.safetensors" in known:
            print("index: none, the weights are one file")
        elif not found:
            where = f"{options.repo_id}/{below}".rstrip("/")
            names = ", ".join(sorted(known)[:8]) + (", ..." if len(known) > 8 else "")
            raise ConfigError(
                Problem(
                    "--assets",
                    kind,
                    rule=f"matches no file of {where}, which has {names or 'no files'}",
                    fix="check --repo_id, or request other assets",
                )
            )
        chosen |= dict.fromkeys(sorted(found))
    return list(chosen)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _parser() -> StrictArgumentParser:
    parser = StrictArgumentParser(
        PROGRAM,
        "Download files of a Hugging Face repository with huggingface_hub, "
        "which reads the environment: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE, HTTPS_PROXY.",
        f"{PROGRAM} --repo_id meta-llama/Llama-3.1-8B --assets tokenizer",
        first="--repo_id",
    )
    parser.add_argument("--repo_id", required=True, metavar="ORG/NAME", help="e.g. meta-llama/Llama-3.1-8B")
    kinds = ", ".join(ASSETS)
    parser.add_argument("--assets", nargs="+", default=["tokenizer"], choices=tuple(ASSETS), help=f"kinds: {kinds}")
    parser.add_argument("--all", action="store_true", help="download all kinds of assets")
    parser.add_argument("--local_dir", type=output_name, metavar="DIR", help="the files go to DIR/NAME (assets/hf)")
    parser.add_argument("--tokenizer_path", metavar="FOLDER", help="folder of the tokenizer in the repository (a name "
                        "from torchtitan of 2024); the files then go to DIR/FOLDER (assets/tokenizer)")  # fmt: skip
    parser.add_argument("--revision", default="main", help="branch, tag or commit (main)")
    return parser
