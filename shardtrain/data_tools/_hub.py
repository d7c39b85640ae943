"""Files of the Hugging Face hub over HTTP: every answer in bounded time, every failure with what to do about it.

It needs the standard library alone. The token goes to the hub's own host and to no other, whatever a redirect says.
"""

from __future__ import annotations

import http.client
import json
import os
import queue
import re
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from email.message import Message
from pathlib import Path
from typing import IO, Any

from shardtrain.errors import ConfigError, Problem, StorageError

DEFAULT_ENDPOINT = "https://huggingface.co"
LONGEST_SILENCE_SECONDS = 8.0
"""Without an answer, or with less than LEAST_BYTES, for so long, the hub counts as out of reach."""
LEAST_BYTES = 4096
LONGEST_WAIT_SECONDS = 2.0
"""A hub that asks for a longer wait is not waited for."""
ATTEMPTS = 3
_BLOCK_BYTES = 2**18
_MOST_LIST_BYTES = 64 * 2**20
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Interrupted(Exception):
    """The connection was lost or the hub was busy; another attempt may do."""


class Hub:
    """One repository of a hub. No message has the token in it."""

    def __init__(self, repo_id: str, revision: str = "main", silence_seconds: float = LONGEST_SILENCE_SECONDS) -> None:
        self.repo_id, self.revision, self._silence_seconds = repo_id, revision, silence_seconds
        self.endpoint = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/") or DEFAULT_ENDPOINT
        parts = urllib.parse.urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(Problem("HF_ENDPOINT", self.endpoint, "is no https address", "correct or unset it"))
        if os.environ.get("HF_HUB_OFFLINE", "").strip().lower() in ("1", "true", "yes", "on"):
            fix = "unset it, or copy the files from a machine that has them"
            raise ConfigError(Problem("HF_HUB_OFFLINE", os.environ["HF_HUB_OFFLINE"], "forbids to ask the hub", fix))
        self._token = find_token()
        if self._token and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            fix = "use https, or unset HF_TOKEN"
            raise ConfigError(Problem("HF_ENDPOINT", self.endpoint, "would send your token without encryption", fix))

    def files(self) -> tuple[str, dict[str, dict[str, Any]]]:
        """Commit of the revision, and what the hub tells of each file: size and hashes, as far as it does.

        Raises:
            ConfigError: when the repository does not exist, may not be read, or its list means nothing.
            StorageError: when the hub cannot be reached or is too slow.
        """
        revision = urllib.parse.quote(self.revision, safe="")
        url = f"{self.endpoint}/api/models/{self.repo_id}/revision/{revision}?blobs=true"
        content = self._retry(lambda: self._read(url))
        try:
            found = json.loads(content)
            files = {str(one["rfilename"]): dict(one) for one in found["siblings"]}
            return str(found.get("sha") or self.revision), files
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            rule = f"gave no list of files for {self.repo_id}"
            raise ConfigError(Problem("HF_ENDPOINT", self.endpoint, rule, "name the address of a hub")) from error

    def open(self, name: str, commit: str, start: int = 0) -> Answer:
        """A file from byte ``start`` on; the caller reads ``blocks``. Raises ``Interrupted`` or what ``files`` does."""
        path = urllib.parse.quote(name)
        url = f"{self.endpoint}/{self.repo_id}/resolve/{urllib.parse.quote(commit, safe='')}/{path}"
        return self._ask(url, {"Range": f"bytes={start}-"} if start else {})

    def _read(self, url: str) -> bytes:
        content = b""
        for block in self._ask(url, {}).blocks():
            content += block
            if len(content) > _MOST_LIST_BYTES:
                rule = f"sends a list of more than {_MOST_LIST_BYTES} bytes"
                raise ConfigError(Problem("HF_ENDPOINT", self.endpoint, rule, "name the address of a hub"))
        return content

    def _retry(self, ask: Any) -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return ask()
            except Interrupted as error:
                if attempt == ATTEMPTS or isinstance(error, StalledError):
                    raise self.unreachable(str(error)) from error
        raise AssertionError("ATTEMPTS is above 0")

    def _ask(self, url: str, headers: Mapping[str, str]) -> Answer:
        # no compression: the hashes are those of the file itself
        request = urllib.request.Request(
            url, headers={"User-Agent": "shardtrain", "Accept-Encoding": "identity", **headers}
        )
        answer = Answer(request, self._token, self._silence_seconds)
        try:
            answer.wait()
        except urllib.error.HTTPError as error:
            raise self._refusal(error.code, error.headers) from None
        except TimeoutError as error:
            raise self._slow() from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._lost(error) from error
        return answer

    def _lost(self, error: Exception) -> Exception:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            return self._slow()
        if isinstance(reason, ssl.SSLError | ConnectionRefusedError) or "getaddrinfo" in repr(reason):
            return self.unreachable(str(reason))
        if "Name or service" in str(reason) or "name resolution" in str(reason):
            return self.unreachable(str(reason))
        return Interrupted(str(reason) or type(reason).__name__)

    def _slow(self) -> StorageError:
        return self.unreachable(f"no answer within {self._silence_seconds:g} seconds")

    def unreachable(self, reason: str) -> StorageError:
        """The error of a hub that does not answer."""
        return StorageError(
            f"{self.endpoint} cannot be reached ({_one_line(reason)}); check the network, HTTPS_PROXY and HF_ENDPOINT, "
            "try again later, or copy the files from a machine that has them"
        )

    def _refusal(self, status: int, headers: Message) -> Exception:
        code = headers.get("X-Error-Code", "")
        settings = "https://huggingface.co/settings/tokens"
        if code == "GatedRepo" or (status == 403 and "gated" in headers.get("X-Error-Message", "").lower()):
            rule = "is gated"
            page = f"https://huggingface.co/{self.repo_id}"
            fix = f"accept its licence at {page}, then set HF_TOKEN to a token of that account ({settings})"
            return ConfigError(Problem("--repo_id", self.repo_id, rule, fix))
        if status in (401, 403) and self._token is not None:
            rule = f"may not be read with the token that was found (status {status})"
            fix = f"set HF_TOKEN to one that is valid and may read it ({settings}), and check the name"
            return ConfigError(Problem("--repo_id", self.repo_id, rule, fix))
        if status in (401, 403):
            rule = "does not exist, or is private or gated"
            fix = f"check the name, and set HF_TOKEN to a token that may read it ({settings})"
            return ConfigError(Problem("--repo_id", self.repo_id, rule, fix))
        if status == 404 and code == "RevisionNotFound":
            rule = f"is no revision of {self.repo_id}"
            return ConfigError(Problem("--revision", self.revision, rule, "name a branch, a tag or a commit"))
        if status == 404:
            return ConfigError(Problem("--repo_id", self.repo_id, "does not exist", "write it like ORGANISATION/NAME"))
        if status == 429 or status >= 500:
            return self._busy(status, headers.get("Retry-After", ""))
        return self.unreachable(f"status {status}")

    def _busy(self, status: int, retry_after: str) -> Exception:
        seconds = float(retry_after) if retry_after.strip().isdecimal() else 1.0
        what = "too many requests" if status == 429 else "a fault of the hub"
        if seconds > LONGEST_WAIT_SECONDS:
            return StorageError(
                f"{self.endpoint} asks to wait {seconds:.0f} seconds ({what}, status {status}); try again then"
            )
        time.sleep(seconds)
        return Interrupted(f"{what}, status {status}")


class Answer:
    """An answer that is read by a thread of its own, so that no name server and no slow host can hold the caller."""

    def __init__(self, request: urllib.request.Request, token: str | None, silence_seconds: float) -> None:
        self.status = 0
        self.headers: Message = Message()
        self.first_headers: Message = Message()
        """Headers of the first answer, before it led elsewhere; the hub tells a file's hash there."""
        self._silence_seconds = silence_seconds
        self._begun = time.monotonic()
        self._queue: queue.Queue[Any] = queue.Queue(maxsize=16)
        self._stopped = threading.Event()
        threading.Thread(target=self._run, args=(request, token), daemon=True).start()

    def wait(self) -> None:
        """Wait for the headers; raises what went wrong, or TimeoutError."""
        try:
            found = self._queue.get(timeout=self._silence_seconds)
        except queue.Empty:
            self._stopped.set()
            raise TimeoutError from None
        if isinstance(found, Exception):
            raise found

    def blocks(self) -> Iterator[bytes]:
        """The content, block by block.

        Raises:
            Interrupted: when it ends early, or hardly anything comes any more.
        """
        begun, received = self._begun, 0
        try:
            while True:
                left = begun + self._silence_seconds - time.monotonic()
                try:
                    found = self._queue.get(timeout=max(left, 0.01))
                except queue.Empty:
                    found = b""
                if found is None:
                    return
                if isinstance(found, Exception):
                    raise Interrupted(_one_line(str(found)) or type(found).__name__) from found
                received += len(found)
                if found:
                    yield found
                if time.monotonic() - begun >= self._silence_seconds:
                    if received < LEAST_BYTES:
                        raise StalledError(f"{received} bytes in {self._silence_seconds:g} seconds")
                    begun, received = time.monotonic(), 0
        finally:
            self._stopped.set()

    def _run(self, request: urllib.request.Request, token: str | None) -> None:
        try:
            opener = urllib.request.build_opener(_Redirects(token, self.first_headers))
            if token:
                request.add_unredirected_header("Authorization", f"Bearer {token}")
            with opener.open(request, timeout=self._silence_seconds) as response:
                self.status, self.headers = response.status, response.headers
                if not self.first_headers:
                    self.first_headers = response.headers
                self._put(b"")
                self._read(response)
        except Exception as error:
            self._put(error)
        else:
            self._put(None)

    def _read(self, response: Any) -> None:
        expected = self.headers.get("Content-Length", "")
        received = 0
        while not self._stopped.is_set() and (block := response.read1(_BLOCK_BYTES)):
            received += len(block)
            self._put(block)
        if expected.isdecimal() and received < int(expected) and not self._stopped.is_set():
            raise ConnectionError(f"the connection ended after {received} of {expected} bytes")

    def _put(self, value: Any) -> None:
        while not self._stopped.is_set():
            try:
                return self._queue.put(value, timeout=0.2)
            except queue.Full:
                continue


class StalledError(Interrupted):
    """The hub sends next to nothing; another attempt would take as long."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the token goes along only to the same host, and never from https to http."""

    def __init__(self, token: str | None, first_headers: Message) -> None:
        self._token, self._first_headers = token, first_headers

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if old.scheme == "https" and new.scheme != "https":
            raise ConnectionError(f"a redirect to {new.hostname} leaves https")
        if not self._first_headers:
            for name, value in headers.items():
                self._first_headers[name] = value
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and self._token and (old.scheme, old.netloc) == (new.scheme, new.netloc):
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        return request


def find_token() -> str | None:
    """The user's token: HF_TOKEN, or the file in which ``hf auth login`` keeps it; None where there is none.

    Raises:
        ConfigError: when what is there cannot be a token; it is not shown.
    """
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    file = Path(os.environ.get("HF_TOKEN_PATH") or os.path.join(home, "token")).expanduser()
    token, origin = os.environ.get("HF_TOKEN", "").strip(), "HF_TOKEN"
    if not token:
        origin = str(file)
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
    if token and not re.fullmatch(r"[!-~]+", token):
        raise ConfigError(Problem(origin, None, "holds no token: it has spaces or signs beyond ASCII", "copy it again"))
    return token or None


def _one_line(text: str) -> str:
    return " ".join(text.split())[:200]
