"""``shardtrain data download``: tokenizer, configuration and weights of a Hugging Face repository.

The requests are ``huggingface_hub``'s: proxies, tokens, offline mode, retries, its cache and Xet storage work as they
do everywhere. What is added here is what a training run rests on: one commit for all files, a hash of each file before
it gets its name, and an end to waiting.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import hashlib
import logging
import os
import re
import shutil
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from shardtrain import __version__
from shardtrain.utils import atomic_io, storage_errors
from shardtrain.utils.arguments import Arguments
from shardtrain.utils.errors import ConfigError, DataError, Problem, ShardtrainError, StorageError
from shardtrain.utils.heartbeat import heartbeat
from shardtrain.utils.log import redact
from shardtrain.utils.units import format_bytes

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

T = TypeVar("T")

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
"""Folder within the target in which files lie until they are whole and checked; removed at the end."""
STALLED_SECONDS = 300.0
"""A download of which nothing arrives for so long has failed; the library writes pieces of 10 MiB."""
_DEFAULT_ENDPOINT = "https://huggingface.co"
_TOKENS_PAGE = "https://huggingface.co/settings/tokens"
_left_behind: WeakSet[threading.Thread] = WeakSet()
"""Threads of calls that took too long: see ``_bounded``."""


def main(words: list[str]) -> int:
    """Run ``shardtrain data download``; gives the exit status.

    Raises:
        ConfigError: at wrong options, or a repository that does not exist or may not be read.
        DataError: when what arrives is not what the hub promised.
        StorageError: when the hub cannot be reached, or a file cannot be written.
    """
    refuse_token(words)
    options = _parser().read(words)
    options.assets = list(dict.fromkeys(ASSETS if options.all else options.assets))
    if options.tokenizer_path and options.assets != ["tokenizer"]:
        raise ConfigError(
            Problem("--tokenizer_path", options.tokenizer_path, "is for the tokenizer alone", "leave it out")
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
        # What is there with the hash that the hub tells stays.
        missing = []
        for name in names:
            expected = _expected(files[name])
            with heartbeat(f"reading {name}"):
                is_there = expected and (folder / name).is_file() and _hash(folder / name, expected[0]) == expected[1]
            if is_there:
                print(f"{name}: is there already", flush=True)
            else:
                missing.append(name)

        if missing:
            folder.mkdir(parents=True, exist_ok=True)
            num_bytes = sum(files[name].size or 0 for name in missing)
            free = shutil.disk_usage(folder).free
            if num_bytes > free:
                raise StorageError(
                    f"{folder} has {format_bytes(free)} free and {format_bytes(num_bytes)} are to be fetched; "
                    "make room, or name another --local_dir"
                )
            with _staging(folder) as staging:
                for name in missing:
                    # on a terminal the library draws a bar
                    with heartbeat(f"fetching {name}", 0 if sys.stderr.isatty() else None):
                        done = fetch(hub, name, commit, files[name], staging, folder / name)
                    print(done, flush=True)
    except OSError as error:
        raise storage_errors.cannot("write", folder, error, "name another --local_dir") from error
    return 0


class Hub:
    """One repository of the hub, asked through ``huggingface_hub``. No message has the token in it.

    Raises:
        ConfigError: at an endpoint or a token that cannot be used.
    """

    def __init__(self, repo_id: str, revision: str = "main") -> None:
        from huggingface_hub import constants, get_token

        # what the library logs (it waits, it tries again) has addresses in it, which may be signed
        for handler in logging.getLogger("huggingface_hub").handlers:
            handler.addFilter(_of_calls_waited_for)
            handler.addFilter(_without_secrets)
        self.repo_id = repo_id
        self.revision = revision
        self.endpoint = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or _DEFAULT_ENDPOINT
        parts = urllib.parse.urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(Problem("HF_ENDPOINT", self.endpoint, "is not an https address", "correct or unset it"))
        self.answer_seconds = float(constants.HF_HUB_ETAG_TIMEOUT)
        try:
            self.token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else self._ask(get_token)
        except Exception as error:  # of files, of a login that is renewed, of OIDC
            rule = f"cannot be found ({_one_line(error)})"
            fix = "log in again with hf auth login, or set HF_TOKEN"
            raise ConfigError(Problem("the token", None, rule, fix)) from error
        if self.token and not re.fullmatch(r"[!-~]+", self.token):
            origin = "HF_TOKEN" if os.environ.get("HF_TOKEN", "").strip() else str(constants.HF_TOKEN_PATH)
            rule = "is not a token: it has spaces or characters beyond ASCII"
            raise ConfigError(Problem(origin, None, rule, "copy it again"))
        if self.token and parts.scheme == "http" and parts.hostname not in ("localhost", "127.0.0.1", "::1"):
            fix = "use https, or unset HF_TOKEN"
            raise ConfigError(Problem("HF_ENDPOINT", self.endpoint, "would send your token without encryption", fix))

    def files(self) -> tuple[str, dict[str, RepoSibling]]:
        """Commit of the revision, and its files with sizes in bytes and hashes, as far as the hub tells them.

        Raises:
            ConfigError: when the repository does not exist, may not be read, or the answer is not a list of files.
            StorageError: when the hub cannot be reached, is too slow, or asks to wait.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        api = HfApi(self.endpoint, token=self.token or False, library_name="shardtrain", library_version=__version__)
        try:
            info = self._ask(
                lambda: api.model_info(
                    self.repo_id, revision=self.revision, files_metadata=True, timeout=self.answer_seconds
                )
            )
            if info.siblings is None:
                raise TypeError("an answer without files")
            return info.sha or self.revision, {str(file.rfilename): file for file in info.siblings}
        except HFValidationError as error:
            rule = "is not the name of a repository"
            fix = "write it like ORGANISATION/NAME"
            raise ConfigError(Problem("--repo_id", self.repo_id, rule, fix)) from error
        except Exception as error:
            # The library fails with plain errors of Python where the answer is JSON of another kind. Its errors of HTTP
            # are some of them ValueError too.
            is_of_python = isinstance(error, ValueError | KeyError | TypeError | AttributeError | RecursionError)
            if isinstance(error, HfHubHTTPError) or not is_of_python:
                raise self._explain(error) from error
            rule = f"did not give a list of the files of {self.repo_id}"
            raise ConfigError(Problem("HF_ENDPOINT", self.endpoint, rule, "name the address of a hub")) from error

    def download(self, name: str, commit: str, folder: Path, force: bool = False) -> Path:
        """Bring a file into ``folder``, or find it there or in the library's cache unless ``force``; gives its path.

        Raises:
            ConfigError, StorageError: as ``files``; also StorageError when the file cannot be written.
            DataError: when the file has another size than the hub tells.
        """
        from huggingface_hub import hf_hub_download

        def call() -> str:
            return hf_hub_download(
                self.repo_id, name, revision=commit, local_dir=folder, force_download=force, endpoint=self.endpoint,
                token=self.token or False, etag_timeout=self.answer_seconds, library_name="shardtrain",
                library_version=__version__,
            )  # fmt: skip

        try:
            return Path(_bounded(call, STALLED_SECONDS, lambda: _written(folder)))
        except Exception as error:
            if "Consistency check failed" in str(error):
                text = f"{name} does not have the size that the hub reported; it is not kept, try again"
                raise DataError(text) from error
            if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
                raise storage_errors.cannot("write", folder / name, error, "name another --local_dir") from error
            raise self._explain(error) from error

    def _ask(self, call: Callable[[], T]) -> T:
        # the library's limit is for each wait on the connection: name servers and slow senders need one of their own
        return _bounded(call, 2 * self.answer_seconds)

    def _explain(self, error: BaseException) -> ShardtrainError:
        """What an error of the library means, and what to do about it."""
        from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

        # "not in the cache either" and "cannot force" hide what the hub said
        while isinstance(error, LocalEntryNotFoundError | ValueError) and error.__cause__ is not None:
            if getattr(error, "response", None) is not None:
                break
            error = error.__cause__
        if isinstance(error, OfflineModeIsEnabled):
            name = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name)), "")
            fix = "unset it, or copy the files from a machine that has them"
            return ConfigError(
                Problem(name or "HF_HUB_OFFLINE", os.environ.get(name, "1"), "forbids to ask the hub", fix)
            )
        response = getattr(error, "response", None)
        if response is not None:
            return self._refusal(response.status_code, response.headers)
        if "No space left on device" in str(error):  # Xet's errors are not OSError
            return StorageError(f"the disk is full ({_one_line(error)}); make room, or name another --local_dir")
        return self._unreachable(_one_line(error) or type(error).__name__)

    def _refusal(self, status: int, headers: Any) -> ShardtrainError:
        code = headers.get("X-Error-Code") or ""
        if code == "GatedRepo" or (status == 403 and "gated" in (headers.get("X-Error-Message") or "").lower()):
            fix = f"accept its licence at https://huggingface.co/{self.repo_id}, then set HF_TOKEN to a token of that "
            fix += f"account ({_TOKENS_PAGE})"
            return ConfigError(Problem("--repo_id", self.repo_id, "is gated", fix))
        if status in (401, 403) and self.token is not None:
            rule = f"may not be read with the token that was found (status {status})"
            fix = f"set HF_TOKEN to one that is valid and may read it ({_TOKENS_PAGE}), and check the name"
            return ConfigError(Problem("--repo_id", self.repo_id, rule, fix))
        if status in (401, 403):
            rule = "does not exist, or is private or gated"
            fix = f"check the name, and set HF_TOKEN to a token that may read it ({_TOKENS_PAGE})"
            return ConfigError(Problem("--repo_id", self.repo_id, rule, fix))
        if status == 404 and code == "RevisionNotFound":
            rule = f"is not a revision of {self.repo_id}"
            return ConfigError(Problem("--revision", self.revision, rule, "name a branch, a tag or a commit"))
        if status == 404:
            return ConfigError(Problem("--repo_id", self.repo_id, "does not exist", "write it like ORGANISATION/NAME"))
        if status == 429 or status >= 500:
            what = "too many requests" if status == 429 else "a fault of the hub"
            seconds = headers.get("Retry-After") or ""
            when = f"in {seconds} seconds" if seconds.isdecimal() else "later"
            return StorageError(f"{self.endpoint} is busy ({what}, status {status}); try again {when}")
        return self._unreachable(f"status {status}")

    def _unreachable(self, reason: str) -> StorageError:
        return StorageError(
            f"{self.endpoint} cannot be reached ({reason}); check the network, HTTPS_PROXY and HF_ENDPOINT, "
            "try again later, or copy the files from a machine that has them"
        )


def fetch(hub: Hub, name: str, commit: str, facts: RepoSibling, staging: Path, target: Path) -> str:
    """Bring one file to ``target``, whole and as the hub has it; gives a line that tells what was done.

    Until then it lies in ``staging``, on the same file system, and what was at ``target`` stays.

    Raises:
        DataError: when its hash or size is another, twice.
        OSError: when it cannot be moved.
        ConfigError, StorageError: as ``Hub.download``.
    """
    expected = _expected(facts)
    path = hub.download(name, commit, staging)
    if expected and _hash(path, expected[0]) != expected[1]:
        # what lay in the library's cache may be damaged: once more, past the cache
        path.unlink()
        path = hub.download(name, commit, staging, force=True)
        found = _hash(path, expected[0])
        if found != expected[1]:
            raise DataError(f"{name} has the hash {found} in place of {expected[1]}; it is not kept, try again")
    target.parent.mkdir(parents=True, exist_ok=True)
    size = path.stat().st_size
    os.replace(path, target)
    return f"{name}: {format_bytes(size)}{'' if expected else ', no hash known'}"


@contextmanager
def _staging(folder: Path) -> Iterator[Path]:
    """A folder that one process at a time may use; it stays after an error, for what the library can resume from."""
    staging = folder / STAGING
    staging.mkdir(exist_ok=True)
    with open(staging / ".lock", "a", opener=atomic_io.open_file) as lock:  # NFS locks only what is open for writing
        # Another process has the lock, or has just removed the file with its folder: a lock on a file that nobody else
        # can open would keep nobody out.
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name)):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            rule = "is being written by another process"
            raise ConfigError(Problem("--local_dir", str(folder), rule, "wait for it to end")) from None
        try:
            yield staging
        except DataError:
            shutil.rmtree(staging, ignore_errors=True)  # what is wrong must not be gone on with
            raise
        shutil.rmtree(staging, ignore_errors=True)


def _bounded(call: Callable[[], T], seconds: float, progress: Callable[[], int] = lambda: 0) -> T:
    """Result of ``call``, made by a thread of its own; TimeoutError once ``progress()`` stays the same for ``seconds``.

    The thread is left behind then: nothing can stop a call that waits for a name server. What it still logs is not
    told, since its end has been.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while True:
        before = progress()
        try:
            return future.result(timeout=seconds)
        except TimeoutError:
            if future.done():
                raise
            if progress() == before:
                _left_behind.add(thread)
                raise TimeoutError(f"nothing arrived for {seconds:g} seconds") from None


def _written(folder: Path) -> int:
    """A number that grows while files of a folder are written, also where they are written in no order."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # it has just been renamed
            status = path.stat()
            total += status.st_size + status.st_blocks
    return total


def _expected(facts: RepoSibling) -> tuple[str, str] | None:
    """Kind and value of the hash that the list of files promises: SHA-256 of large files, else git's."""
    if facts.lfs is not None:
        return ("sha256", facts.lfs.sha256) if re.fullmatch(r"[0-9a-f]{64}", str(facts.lfs.sha256)) else None
    return ("git", str(facts.blob_id)) if re.fullmatch(r"[0-9a-f]{40}", str(facts.blob_id)) else None


def _hash(path: Path, kind: str) -> str:
    with path.open("rb") as file:
        head = b"blob %d\0" % os.fstat(file.fileno()).st_size
        digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(head, usedforsecurity=False)
        while block := file.read(2**20):
            digest.update(block)
        os.fsync(file.fileno())  # it gets its name next
    return digest.hexdigest()


def _one_line(error: BaseException) -> str:
    return _plain(" ".join(str(error).split()))[:200]


def _plain(text: str) -> str:
    """A text without secrets: what follows the ``?`` of an address may be a signature."""
    return redact(re.sub(r"\?[\w.%-]+=[^\s'\":)]*", "", text))


def _of_calls_waited_for(_: logging.LogRecord) -> bool:
    return threading.current_thread() not in _left_behind


def _without_secrets(record: logging.LogRecord) -> bool:
    record.msg = _plain(" ".join(record.getMessage().split()))
    record.args = ()
    return True


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


def refuse_token(words: Sequence[str], program: str = PROGRAM) -> None:
    """Raise ConfigError if a command-line argument contains a Hugging Face access token."""
    if any(word.partition("=")[0].replace("-", "_") in ("__hf_token", "__token") for word in words):
        rule = "would show the token to everyone on this machine, and leave it in the shell's history"
        fix = "set the environment variable HF_TOKEN, or log in once with hf auth login"
        raise ConfigError(Problem("--hf_token", None, rule, fix))
    # a folder may be called hf_model; a token has some 34 letters and digits after hf_
    if any(re.match(r"hf_[A-Za-z0-9]{16,}", word) for word in words):
        rule = "has an argument that looks like an access token"
        raise ConfigError(Problem(program, None, rule, "set the environment variable HF_TOKEN instead"))


def _parser() -> Arguments:
    parser = Arguments(
        PROGRAM,
        "Fetch files of a Hugging Face repository, with huggingface_hub and its environment variables: HF_TOKEN, "
        "HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE, HTTPS_PROXY.",
        f"{PROGRAM} --repo_id meta-llama/Llama-3.1-8B --assets tokenizer",
        first="--repo_id",
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
