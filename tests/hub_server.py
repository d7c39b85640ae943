"""A Hugging Face Hub on loopback, as far as downloads and uploads need one, and an environment that points to it."""

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
    """A hub on loopback; ``fault(handler, path)`` may answer in its place and give True."""

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
        """Large files by their hash, committed or not."""
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fetched(self) -> list[str]:
        """Files of which the content was asked for."""
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path]

    def close(self) -> None:
        self.closing = True
        self.shutdown()
        self.server_close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave early are part of the tests."""

    def facts(self) -> list[dict[str, object]]:
        found = []
        for name, content in self.files.items():
            one = {"rfilename": name, "size": len(content), "blobId": blob(content)}
            if is_large(name):
                digest = hashlib.sha256(content).hexdigest()
                one["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 134}
            found.append(one)
        return found


def is_large(name: str) -> bool:
    return name in LARGE or name.endswith(".safetensors")


def blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *arguments: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.server.requests.append((self.command, self.path, headers))
        if self.server.fault(self, self.path):
            return
        if self.path.startswith("/api/whoami"):
            said = {"name": "someone", "type": "user", "auth": {"accessToken": {"role": self.server.role}}}
            return self.give(json.dumps(said).encode())
        if not self.server.exists:
            return self.refuse(404, X_Error_Code="RepoNotFound")
        if self.path.startswith("/api/models/"):
            facts = {"id": "org/name", "sha": self.server.head, "private": self.server.private}
            facts["siblings"] = self.server.facts()
            return self.give(json.dumps(facts).encode())
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
        """Create a repository, say how files are sent, store a large one, commit."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, {k.lower(): v for k, v in self.headers.items()}))
        if self.server.fault(self, self.path):
            return None
        if self.command == "PUT":
            self.server.stored[hashlib.sha256(body).hexdigest()] = body
            return self.refuse(200)
        if self.path == "/api/repos/create":
            said = json.loads(body)
            self.server.exists, self.server.private, self.server.files = True, said.get("visibility") == "private", {}
            return self.give(json.dumps({"url": f"{self.server.url}/org/name", "name": "org/name"}).encode())
        if self.path == "/api/validate-yaml":  # of a card's front matter
            wrong = [] if json.loads(body)["content"].startswith("---") else [{"message": "no front matter"}]
            return self.give(json.dumps({"errors": wrong, "warnings": []}).encode(), status=400 if wrong else 200)
        if "/preupload/" in self.path:
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if is_large(one["path"]) else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
            return self.give(json.dumps({"files": files}).encode())
        if self.path.endswith("/info/lfs/objects/batch"):
            objects = []
            for one in json.loads(body)["objects"]:
                action = {"href": f"{self.server.url}/put/{one['oid']}?signature=secretsignature"}
                known = one["oid"] in self.server.stored
                objects.append({**one, **({} if known else {"actions": {"upload": action}})})
            return self.give(json.dumps({"transfer": "basic", "objects": objects}).encode())
        assert "/commit/" in self.path, self.path
        header, *operations = [json.loads(line) for line in body.splitlines()]
        if header["value"].get("parentCommit") not in (None, self.server.head):
            return self.refuse(412)
        for one in operations:
            value = one["value"]
            if one["key"] == "deletedFile":
                del self.server.files[value["path"]]
            elif one["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.stored[value["oid"]]
            else:
                self.server.files[value["path"]] = base64.b64decode(value["content"])
        self.server.head = hashlib.sha1(body).hexdigest()
        done = {"success": True, "commitOid": self.server.head, "commitUrl": f"{self.server.url}/org/name/commit/x"}
        return self.give(json.dumps(done).encode())

    do_PUT = do_POST

    def give(self, content: bytes, told: int | None = None, status: int = 200, **headers: str) -> bool:
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        self.send_response(206 if start else status)
        self.send_header("Content-Length", str((told or len(content)) - start))
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
    """What a fixture yields: the hub, and the library told of it alone."""
    server = FakeHub()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("NO_PROXY", "*")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_OIDC_RESOURCE"):
        monkeypatch.delenv(name, raising=False)
    # the library has read its environment when it was imported
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "home" / "token"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    # no test waits out a pause of the library's, between tries
    pause = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: pause(min(seconds, 0.01)))
    getattr(huggingface_hub, "close_session", lambda: None)()  # it has the proxies of when it was opened
    yield server
    server.close()
