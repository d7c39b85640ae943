"""``shardtrain data download``: tokenizer, configuration and weights of a Hugging Face repository."""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import hashlib
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import IO, Any

from shardtrain.arguments import Arguments
from shardtrain.data_tools._hub import ATTEMPTS, LEAST_BYTES, Answer, Hub, Interrupted, StalledError
from shardtrain.errors import ConfigError, DataError, Problem, StorageError
from shardtrain.units import format_bytes

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
_PROGRESS_SECONDS = 1.0


def main(words: list[str]) -> int:
    """Run ``shardtrain data download``; gives the exit status.

    Raises:
        ConfigError: at wrong options, or a repository that does not exist or may not be read.
        DataError: when what arrives is not what the hub promised.
        StorageError: when the hub cannot be reached, or a file cannot be written.
    """
    _refuse_token(words)
    options = _parser().read(words)
    if options is None:
        return 0
    _check(options)
    hub = Hub(options.repo_id, options.revision)
    commit, known = hub.files()
    folder = Path(options.local_dir or ("assets/tokenizer" if options.tokenizer_path is not None else "assets/hf"))
    if options.tokenizer_path is None:
        folder = folder / options.repo_id.rpartition("/")[2]
    names = _choose(options, list(known))
    print(f"{options.repo_id} at {commit}: {len(names)} files to {folder}")
    for name in names:
        print(fetch(hub, name, commit, folder, known[name]), flush=True)
    return 0


def fetch(hub: Hub, name: str, commit: str, folder: Path, facts: Mapping[str, Any]) -> str:
    """Bring one file into a folder, whole and as the hub has it; gives a line that tells what was done.

    A part of it that an earlier call left behind is gone on with. Until the file is whole and its hash is right it has
    another name.

    Raises:
        DataError: when its hash or size is another.
        StorageError: when the hub is too slow or lost, or the file cannot be written.
    """
    target = folder / name
    expected = _expected(facts)
    if expected and target.is_file() and _hash_file(target, expected[0]) == expected[1]:
        return f"{name}: is there already"
    part = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with part.open("a+b") as file:
            _lock(file, part)
            size = _receive(hub, name, commit, file, expected, facts.get("size"))
            file.flush()
            os.fsync(file.fileno())
            os.replace(part, target)
    except DataError:
        part.unlink(missing_ok=True)  # what is wrong must not be gone on with
        raise
    except OSError as error:
        raise StorageError(
            f"cannot write {target}: {error.strerror}; make room, or name another --local_dir"
        ) from error
    return f"{name}: {format_bytes(size)}{'' if expected else ', no hash known'}"


def _receive(hub: Hub, name: str, commit: str, file: IO[bytes], expected: tuple[str, str] | None, size: Any) -> int:
    """Write the content to ``file``, with as many attempts as bring it forward; gives its size in bytes."""
    failures = 0
    from_before = file.seek(0, os.SEEK_END) > 0
    while True:
        start = file.seek(0, os.SEEK_END)
        if start and ((expected is None and from_before) or (isinstance(size, int) and start >= size)):
            file.truncate(0)  # nothing proves that the part belongs to this file
            start, from_before = 0, False
        try:
            answer = hub.open(name, commit, start)
            if start and answer.status != 206:
                file.truncate(0)
            _copy(answer, file, name, size if isinstance(size, int) else None)
            expected = _promised(answer) or expected
            try:
                return _check_content(file, name, expected, size)
            except DataError:
                if not from_before:
                    raise
                from_before = False  # the part may be of another version of the file
                file.truncate(0)
        except StalledError as error:
            raise hub.unreachable(f"it sends too slowly, {error}") from error
        except Interrupted as error:
            failures = 0 if file.seek(0, os.SEEK_END) >= start + LEAST_BYTES else failures + 1
            if failures >= ATTEMPTS:
                raise hub.unreachable(str(error)) from error


def _copy(answer: Answer, file: IO[bytes], name: str, size: int | None) -> None:
    done, told = file.seek(0, os.SEEK_END), time.monotonic()
    for block in answer.blocks():
        file.write(block)
        done += len(block)
        if size is not None and done > size:
            raise DataError(f"{name} is longer than the {size} bytes that the hub told; try again")
        if sys.stderr.isatty() and time.monotonic() - told > _PROGRESS_SECONDS:
            told = time.monotonic()
            whole = f" of {format_bytes(size)}" if size else ""
            print(f"\r{name}: {format_bytes(done)}{whole} ", end="", file=sys.stderr, flush=True)


def _check_content(file: IO[bytes], name: str, expected: tuple[str, str] | None, size: Any) -> int:
    file.flush()
    length = file.seek(0, os.SEEK_END)
    if isinstance(size, int) and length != size:
        raise DataError(f"{name} has {length} bytes in place of {size}; it is not kept, try again")
    if expected is not None:
        found = _hash(file, expected[0])
        if found != expected[1]:
            raise DataError(f"{name} has the hash {found} in place of {expected[1]}; it is not kept, try again")
    return length


def _expected(facts: Mapping[str, Any]) -> tuple[str, str] | None:
    """Kind and value of the hash that the list of files promises: SHA-256 of large files, else git's."""
    lfs = facts.get("lfs")
    if isinstance(lfs, Mapping) and re.fullmatch(r"[0-9a-f]{64}", str(lfs.get("sha256") or lfs.get("oid"))):
        return "sha256", str(lfs.get("sha256") or lfs.get("oid"))
    if lfs is None and re.fullmatch(r"[0-9a-f]{40}", str(facts.get("blobId"))):
        return "git", str(facts["blobId"])
    return None


def _promised(answer: Answer) -> tuple[str, str] | None:
    """The same from the headers of a file's own answer."""
    # other servers than a hub use ETag for hashes of other kinds
    for header in ("X-Linked-Etag", "ETag") if "X-Repo-Commit" in answer.first_headers else ("X-Linked-Etag",):
        etag = (answer.first_headers.get(header) or "").removeprefix("W/").strip('"')
        if re.fullmatch(r"[0-9a-f]{64}", etag):
            return "sha256", etag
        if re.fullmatch(r"[0-9a-f]{40}", etag):
            return "git", etag
    return None


def _hash(file: IO[bytes], kind: str) -> str:
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(b"blob %d\0" % length, usedforsecurity=False)
    while block := file.read(2**20):
        digest.update(block)
    return digest.hexdigest()


def _hash_file(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        return _hash(file, kind)


def _lock(file: IO[bytes], part: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        rule = "is being written by another process"
        raise ConfigError(Problem("--local_dir", str(part.parent), rule, "wait for it to end")) from None


def _choose(options: argparse.Namespace, known: Sequence[str]) -> list[str]:
    """Files of the kinds asked for; raises ConfigError at a kind that the repository has no file of."""
    for name in known:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name or not path.parts:
            rule = f"has a file named {name[:80]!r}, which leads out of its folder"
            raise ConfigError(Problem("--repo_id", options.repo_id, rule, "do not use this repository"))
    below = f"{options.tokenizer_path.strip('/')}/" if options.tokenizer_path else ""
    chosen: dict[str, None] = {}
    for kind in options.assets:
        found = [name for name in known if _matches(name.removeprefix(below), ASSETS[kind]) and name.startswith(below)]
        if kind == "index" and not found and "model.safetensors" in known:
            print("index: none, the weights are one file")
        elif not found:
            where = f"{options.repo_id}/{below}".rstrip("/")
            names = ", ".join(sorted(known)[:8]) + (", ..." if len(known) > 8 else "")
            rule = f"finds nothing in {where}; its files are {names or 'none'}"
            raise ConfigError(Problem("--assets", kind, rule, "check --repo_id, or ask for other assets"))
        chosen |= dict.fromkeys(sorted(found))
    return list(chosen)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(name.count("/") == pattern.count("/") and fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _refuse_token(words: Sequence[str]) -> None:
    if any(word.partition("=")[0].replace("-", "_") in ("__hf_token", "__token") for word in words):
        rule = "would show the token to everyone on this machine, and leave it in the shell's history"
        fix = "set the environment variable HF_TOKEN, or log in once with hf auth login"
        raise ConfigError(Problem("--hf_token", None, rule, fix))
    if any(word.startswith("hf_") for word in words):
        rule = "has a word that looks like a token"
        raise ConfigError(Problem(PROGRAM, None, rule, "set the environment variable HF_TOKEN in its place"))


def _check(options: argparse.Namespace) -> None:
    name = options.repo_id
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name, flags=re.ASCII) or {".", ".."} & set(name.split("/")):
        raise ConfigError(Problem("--repo_id", name, "is no name of a repository", "write it like ORGANISATION/NAME"))
    options.assets = list(dict.fromkeys(ASSETS if options.all else options.assets))
    if options.tokenizer_path and options.assets != ["tokenizer"]:
        raise ConfigError(
            Problem("--tokenizer_path", options.tokenizer_path, "is for the tokenizer alone", "leave it out")
        )


def _parser() -> Arguments:
    parser = Arguments(
        PROGRAM, "Fetch files of a Hugging Face repository. HF_TOKEN, HF_ENDPOINT and HTTPS_PROXY count."
    )
    parser.add_argument("--repo_id", required=True, metavar="ORG/NAME", help="e.g. meta-llama/Llama-3.1-8B")
    kinds = ", ".join(ASSETS)
    parser.add_argument("--assets", nargs="+", default=["tokenizer"], choices=tuple(ASSETS), help=f"kinds: {kinds}")
    parser.add_argument("--all", action="store_true", help="all kinds of assets")
    parser.add_argument("--local_dir", metavar="DIR", help="the files go to DIR/NAME (assets/hf)")
    parser.add_argument("--tokenizer_path", metavar="FOLDER", help="folder of the tokenizer within the repository, as "
                        "torchtitan of 2024 calls it; the files then go to DIR/FOLDER (assets/tokenizer)")  # fmt: skip
    parser.add_argument("--revision", default="main", help="branch, tag or commit (main)")
    return parser
