"""Client of one repository of the Hugging Face Hub, for downloads and uploads.

``huggingface_hub`` sends the requests, so proxies, tokens, offline mode, retries, its cache and Xet storage
work as usual. This client adds time limits, hashes, and one-line errors without secrets.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakSet

from shardtrain import __version__
from shardtrain.utils import atomic_io, storage_errors
from shardtrain.utils.errors import ConfigError, DataError, Problem, ShardtrainError, StorageError
from shardtrain.utils.hub_errors import describe_error, without_secrets

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

T = TypeVar("T")

STALLED_SECONDS = 300.0
"""Time limit of a download that writes nothing. The library writes blocks of 10 MiB."""
TOKENS_PAGE = "https://huggingface.co/settings/tokens"
_DEFAULT_ENDPOINT = "https://huggingface.co"
_left_behind: WeakSet[threading.Thread] = WeakSet()
"""Threads of calls that exceeded their time limit. ``bounded`` cannot stop them."""


class Hub:
    """One repository of the hub, accessed through ``huggingface_hub``. Error messages never contain the token.

    Raises:
        ConfigError: the endpoint or the token is invalid.
    """

    def __init__(self, repo_id: str, revision: str = "main") -> None:
        from huggingface_hub import constants, get_token

        # The library logs the addresses of retried requests, which may contain signatures.
        for handler in logging.getLogger("huggingface_hub").handlers:
            handler.addFilter(_of_calls_waited_for)
            handler.addFilter(_without_secrets)
        self.repo_id = repo_id
        self.revision = revision
        self.endpoint = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or _DEFAULT_ENDPOINT
        parts = urllib.parse.urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                Problem(
                    "HF_ENDPOINT",
                    self.endpoint,
                    rule="is not an https address",
                    fix="correct or unset it",
                )
            )
        self.answer_seconds = float(constants.HF_HUB_ETAG_TIMEOUT)
        try:
            self.token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else self.ask(get_token)
        except Exception as error:  # of files, of a login that is renewed, of OIDC
            raise ConfigError(
                Problem(
                    "the token",
                    None,
                    rule=f"cannot be read ({describe_error(error)})",
                    fix="log in again with hf auth login, or set HF_TOKEN",
                )
            ) from error
        if self.token and not re.fullmatch(r"[!-~]+", self.token):
            origin = (
                "HF_TOKEN"
                if os.environ.get("HF_TOKEN", "").strip()
                else str(constants.HF_TOKEN_PATH)
            )
            raise ConfigError(
                Problem(
                    origin,
                    None,
                    rule="is not a token, because it contains spaces or non-ASCII characters",
                    fix="copy it again",
                )
            )
        if (
            self.token
            and parts.scheme == "http"
            and parts.hostname not in ("localhost", "127.0.0.1", "::1")
        ):
            raise ConfigError(
                Problem(
                    "HF_ENDPOINT",
                    self.endpoint,
                    rule="would send the token unencrypted",
                    fix="use https, or unset HF_TOKEN",
                )
            )

    def files(self) -> tuple[str, dict[str, RepoSibling]]:
        """Return the commit of the revision, and its files by name with size in bytes and hash.

        Raises:
            ConfigError: the repository does not exist or is not readable, or the answer is not a list of files.
            StorageError: the hub cannot be reached, is too slow, or requests a pause.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        api = HfApi(
            self.endpoint,
            token=self.token or False,
            library_name="shardtrain",
            library_version=__version__,
        )
        try:
            info = self.ask(
                lambda: api.model_info(
                    self.repo_id,
                    revision=self.revision,
                    files_metadata=True,
                    timeout=self.answer_seconds,
                )
            )
            if info.siblings is None:
                raise TypeError("an answer without files")
            return info.sha or self.revision, {str(file.rfilename): file for file in info.siblings}
        except HFValidationError as error:
            raise ConfigError(
                Problem(
                    "--repo_id",
                    self.repo_id,
                    rule="is not a valid repository name",
                    fix="use the form ORGANIZATION/NAME",
                )
            ) from error
        except Exception as error:
            # For JSON of another structure the library raises built-in exceptions of Python. Some of its HTTP
            # errors are subclasses of ValueError.
            is_of_python = isinstance(
                error, ValueError | KeyError | TypeError | AttributeError | RecursionError
            )
            if isinstance(error, HfHubHTTPError) or not is_of_python:
                raise self.explain(error) from error
            raise ConfigError(
                Problem(
                    "HF_ENDPOINT",
                    self.endpoint,
                    rule=f"did not return a list of the files of {self.repo_id}",
                    fix="set it to the address of a hub",
                )
            ) from error

    def download(self, name: str, commit: str, folder: Path, force: bool = False) -> Path:
        """Download a file to ``folder`` and return its path. Existing files in the folder or the library's
        cache are reused.

        ``force`` always downloads.

        Raises:
            ConfigError, StorageError: as ``files``. StorageError also if the file cannot be written.
            DataError: the size of the file differs from the size that the hub reports.
        """
        from huggingface_hub import hf_hub_download

        def call() -> str:
            return hf_hub_download(
                self.repo_id, name, revision=commit, local_dir=folder, force_download=force, endpoint=self.endpoint,
                token=self.token or False, etag_timeout=self.answer_seconds, library_name="shardtrain",
                library_version=__version__,
            )  # fmt: skip

        try:
            return Path(bounded(call, STALLED_SECONDS, lambda: _written(folder)))
        except Exception as error:
            if "Consistency check failed" in str(error):
                text = f"{name} does not have the size that the hub reported, so it was deleted; try again"
                raise DataError(text) from error
            if (
                isinstance(error, OSError)
                and error.errno is not None
                and not isinstance(error, ConnectionError)
            ):
                raise storage_errors.cannot(
                    "write", folder / name, error, "name another --local_dir"
                ) from error
            raise self.explain(error) from error

    def ask(self, call: Callable[[], T]) -> T:
        """Return the answer to a short request. Raise TimeoutError after twice ``HF_HUB_ETAG_TIMEOUT``."""
        # The library limits each wait on the connection, but not name servers and slow senders.
        return bounded(call, 2 * self.answer_seconds)

    def explain(self, error: BaseException) -> ShardtrainError:
        """Convert an error of the library to one that contains a fix."""
        from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

        # The outer errors ("not in the cache either", "cannot force") hide the answer of the hub.
        while (
            isinstance(error, LocalEntryNotFoundError | ValueError) and error.__cause__ is not None
        ):
            if getattr(error, "response", None) is not None:
                break
            error = error.__cause__
        if isinstance(error, OfflineModeIsEnabled):
            name = next(
                (
                    name
                    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
                    if os.environ.get(name)
                ),
                "",
            )
            fix = "unset it, or copy the files from a machine that has them"
            return ConfigError(
                Problem(
                    name or "HF_HUB_OFFLINE",
                    os.environ.get(name, "1"),
                    "forbids requests to the hub",
                    fix,
                )
            )
        response = getattr(error, "response", None)
        if response is not None:
            return self._refusal(response.status_code, response.headers)
        if "No space left on device" in str(error):  # Xet's errors are not OSError
            return StorageError(
                f"the disk is full ({describe_error(error)}); make room, or name another --local_dir"
            )
        return self._unreachable(describe_error(error) or type(error).__name__)

    def _refusal(self, status: int, headers: Any) -> ShardtrainError:
        code = headers.get("X-Error-Code") or ""
        if code == "GatedRepo" or (
            status == 403 and "gated" in (headers.get("X-Error-Message") or "").lower()
        ):
            fix = f"accept its license at https://huggingface.co/{self.repo_id}, then set HF_TOKEN to a token of that "
            fix += f"account ({TOKENS_PAGE})"
            return ConfigError(Problem("--repo_id", self.repo_id, "is gated", fix))
        if status in (401, 403) and self.token is not None:
            rule = f"is not readable with the current token (status {status})"
            fix = f"set HF_TOKEN to a valid token with read access ({TOKENS_PAGE}), and check the name"
            return ConfigError(Problem("--repo_id", self.repo_id, rule, fix))
        if status in (401, 403):
            rule = "does not exist, or is private or gated"
            fix = f"check the name, and set HF_TOKEN to a token with read access ({TOKENS_PAGE})"
            return ConfigError(Problem("--repo_id", self.repo_id, rule, fix))
        if status == 404 and code == "RevisionNotFound":
            rule = f"is not a revision of {self.repo_id}"
            return ConfigError(
                Problem("--revision", self.revision, rule, "name a branch, a tag or a commit")
            )
        if status == 404:
            return ConfigError(
                Problem(
                    "--repo_id", self.repo_id, "does not exist", "use the form ORGANIZATION/NAME"
                )
            )
        if status == 429 or status >= 500:
            what = "too many requests" if status == 429 else "an error of the hub"
            seconds = headers.get("Retry-After") or ""
            when = f"in {seconds} seconds" if seconds.isdecimal() else "later"
            return StorageError(
                f"{self.endpoint} is busy ({what}, status {status}); try again {when}"
            )
        return self._unreachable(f"status {status}")

    def _unreachable(self, reason: str) -> StorageError:
        return StorageError(
            f"{self.endpoint} cannot be reached ({reason}); check the network, "
            "HTTPS_PROXY and HF_ENDPOINT, try again later, or copy the files from a machine that "
            "has them"
        )


def bounded(call: Callable[[], T], seconds: float, progress: Callable[[], int] = lambda: 0) -> T:
    """Run ``call`` in a thread and return its result.

    A thread that exceeds the limit keeps running, because a call that waits for a name server cannot be
    stopped. Its later log messages are dropped.

    Raises:
        TimeoutError: ``progress()`` did not change for ``seconds``.
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
            # The call itself may have raised TimeoutError, or may have ended just now.
            if future.done():
                return future.result()
            if progress() == before:
                _left_behind.add(thread)
                raise TimeoutError(f"nothing arrived for {seconds:g} seconds") from None


def _written(folder: Path) -> int:
    """Return a number that grows while files of a folder are written, regardless of their order."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # it has just been renamed
            status = path.stat()
            total += status.st_size + status.st_blocks
    return total


def expected_hash(facts: RepoSibling) -> tuple[str, str] | None:
    """Return kind and value of a file's hash as the hub reports it: SHA-256 for large files, else git's, else None."""
    if facts.lfs is not None:
        return (
            ("sha256", facts.lfs.sha256)
            if re.fullmatch(r"[0-9a-f]{64}", str(facts.lfs.sha256))
            else None
        )
    return (
        ("git", str(facts.blob_id)) if re.fullmatch(r"[0-9a-f]{40}", str(facts.blob_id)) else None
    )


def hash_of_file(path: Path, kind: str) -> str:
    """Return the hash of a file in hex, and flush the file to disk. ``kind`` is "sha256" or "git"."""
    with open(path, "rb", opener=atomic_io.without_waiting) as file:
        head = b"blob %d\0" % os.fstat(file.fileno()).st_size
        digest = hashlib.sha256() if kind == "sha256" else hashlib.sha1(head, usedforsecurity=False)
        while block := file.read(2**20):
            digest.update(block)
        os.fsync(file.fileno())  # it gets its name next
    return digest.hexdigest()


def _of_calls_waited_for(_: logging.LogRecord) -> bool:
    return threading.current_thread() not in _left_behind


def _without_secrets(record: logging.LogRecord) -> bool:
    record.msg = without_secrets(" ".join(record.getMessage().split()))
    record.args = ()
    return True


def refuse_token(arguments: Sequence[str], program: str) -> None:
    """Raise ConfigError if a command-line argument contains a Hugging Face access token."""
    if any(
        argument.partition("=")[0].replace("-", "_") in ("__hf_token", "__token")
        for argument in arguments
    ):
        raise ConfigError(
            Problem(
                "--hf_token",
                None,
                rule="would show the token to all users of this machine, and leave it in the shell history",
                fix="set the environment variable HF_TOKEN, or log in once with hf auth login",
            )
        )
    # A folder may be named hf_model. A token has about 34 letters and digits after hf_.
    if any(re.match(r"hf_[A-Za-z0-9]{16,}", argument) for argument in arguments):
        raise ConfigError(
            Problem(
                program,
                None,
                rule="has an argument that looks like an access token",
                fix="set the environment variable HF_TOKEN instead",
            )
        )
