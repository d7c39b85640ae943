"""A fake Hugging Face Hub on loopback for downloads and uploads, and an environment that points to it."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

TOKEN = "hf_canary0123456789abcdef"
COMMIT = "c0ffee" + "0" * 34
WEIGHTS = bytes(range(256)) * 3000
FILES = {
    "tokenizer.json": b'{"model": {}}',
    "tokenizer_config.json": b"{}",
    "original/tokenizer.model": b"AA== 0\n",
    "config.json": b'{"hidden_size": 8}',
    "model.safetensors": WEIGHTS,
    "README.md": b"# readme",
}
LARGE = ("model.safetensors", "original/tokenizer.model")


class FakeHub(http.server.ThreadingHTTPServer):
    """A hub on loopback. ``fault(handler, path)`` may answer a request instead of the hub, and then returns True."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = dict(FILES)
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.fault = lambda handler, path: False
        self.cdn: str | None = None
        self.closing = False
        self.exists, self.private, self.role, self.head = True, False, "write", COMMIT
        self.stored: dict[str, bytes] = {}
        """Large files by their hash, including files that are not committed."""
        threading.Thread(
            target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
        ).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fetched(self) -> list[str]:
        """Return the names of the files whose content was requested."""
        return [
            path.rpartition("/")[2]
            for method, path, _ in self.requests
            if method == "GET" and "/resolve/" in path
        ]

    def close(self) -> None:
        self.closing = True
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors: some tests disconnect early."""

    def facts(self) -> list[dict[str, object]]:
        files = []
        for name, content in self.files.items():
            file = {"rfilename": name, "size": len(content), "blobId": blob(content)}
            if is_large(name):
                digest = hashlib.sha256(content).hexdigest()
                file["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            files.append(file)
        return files


def is_large(name: str) -> bool:
    return name in LARGE or name.endswith(".safetensors")


def blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *arguments: object) -> None:
        """Suppress the access log."""

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.command, self.path, headers))
        if self.server.fault(self, self.path):
            return
        if self.path.startswith("/api/whoami"):
            authorization = {"accessToken": {"role": self.server.role}}
            user = {"name": "someone", "type": "user", "auth": authorization}
            return self.give(json.dumps(user).encode())
        if not self.server.exists:
            return self.refuse(404, X_Error_Code="RepoNotFound")
        if self.path.startswith("/api/models/"):
            facts = {"id": "org/name", "sha": self.server.head, "private": self.server.private}
            facts["siblings"] = self.server.facts()
            return self.give(json.dumps(facts).encode())

        # Send the file. With a CDN, redirect to its content there.
        name = self.path.partition("?")[0].split("/resolve/", 1)[1].split("/", 1)[1]
        content = self.server.files[name]
        etag = hashlib.sha256(content).hexdigest() if is_large(name) else blob(content)
        if self.server.cdn:
            size = {"X-Linked-Size": str(len(content)), "X-Linked-Etag": f'"{etag}"'}
            location = f"{self.server.cdn}/x/resolve/y/{name}?signature=secretsignature"
            return self.refuse(302, Location=location, X_Repo_Commit=COMMIT, **size)
        self.give(content, X_Repo_Commit=COMMIT, ETag=f'"{etag}"')

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Create a repository, select upload modes, store a large file, or commit."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.command, self.path, headers))
        if self.server.fault(self, self.path):
            return None
        if self.command == "PUT":
            self.server.stored[hashlib.sha256(body).hexdigest()] = body
            return self.refuse(200)
        if self.path == "/api/repos/create":
            self.server.exists = True
            self.server.private = json.loads(body).get("visibility") == "private"
            self.server.files = {}
            created = {"url": f"{self.server.url}/org/name", "name": "org/name"}
            return self.give(json.dumps(created).encode())
        if self.path == "/api/validate-yaml":  # validates the front matter of a model card
            has_front_matter = json.loads(body)["content"].startswith("---")
            errors = [] if has_front_matter else [{"message": "no front matter"}]
            verdict = json.dumps({"errors": errors, "warnings": []}).encode()
            return self.give(verdict, status=400 if errors else 200)
        if "/preupload/" in self.path:
            files = []
            for file in json.loads(body)["files"]:
                mode = "lfs" if is_large(file["path"]) else "regular"
                files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False})
            return self.give(json.dumps({"files": files}).encode())
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            for entry in objects:
                if entry["oid"] not in self.server.stored:
                    url = f"{self.server.url}/put/{entry['oid']}?signature=secretsignature"
                    entry["actions"] = {"upload": {"href": url}}
            return self.give(json.dumps({"transfer": "basic", "objects": objects}).encode())
        assert "/commit/" in self.path, self.path
        return self.commit(body)

    def commit(self, body: bytes) -> None:
        header, *operations = [json.loads(line) for line in body.splitlines()]
        if header["value"].get("parentCommit") not in (None, self.server.head):
            return self.refuse(412)
        for operation in operations:
            value = operation["value"]
            if operation["key"] == "deletedFile":
                del self.server.files[value["path"]]
            elif operation["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.stored[value["oid"]]
            else:
                self.server.files[value["path"]] = base64.b64decode(value["content"])
        self.server.head = hashlib.sha1(body).hexdigest()
        committed = {
            "success": True,
            "commitOid": self.server.head,
            "commitUrl": f"{self.server.url}/org/name/commit/x",
        }
        return self.give(json.dumps(committed).encode())

    do_PUT = do_POST

    def give(
        self, content: bytes, claimed_size: int | None = None, status: int = 200, **headers: str
    ) -> bool:
        """Send content, beginning at the requested range. ``claimed_size`` overrides Content-Length."""
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        self.send_response(206 if start else status)
        self.send_header("Content-Length", str((claimed_size or len(content)) - start))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[start:])
        return True

    def refuse(self, status: int, **headers: str) -> bool:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        return True


def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """Yield a hub, with ``huggingface_hub`` configured to use only this hub. For use in a fixture."""
    server = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("NO_PROXY", "*")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    # the library reads its environment on import
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    # shorten the library's pauses between retries
    pause = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: pause(min(seconds, 0.01)))
    # an open session would keep the proxies of the old environment
    getattr(huggingface_hub, "close_session", lambda: None)()
    yield server
    server.close()
