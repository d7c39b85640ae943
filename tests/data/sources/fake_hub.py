"""Fake Hugging Face hub on localhost: a few dataset repositories, and the error responses of the real hub."""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
REFUSALS = {
    "none/": (404, {"X-Error-Code": "RepoNotFound"}),
    "closed/": (
        401,
        {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."},
    ),
    "gated/": (
        403,
        {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this dataset is restricted."},
    ),
    "busy/": (429, {"Retry-After": "300"}),
    "broken/": (500, {}),
}


def lines(first: int, count: int) -> bytes:
    """JSON lines {"text": "row N"}, compressed."""
    rows = (json.dumps({"text": f"row {number}"}) + "\n" for number in range(first, first + count))
    return gzip.compress("".join(rows).encode(), mtime=0)


README = b"""---
configs:
- config_name: en
  default: true
  data_files:
  - {split: train, path: en/c4-train.*.json.gz}
  - {split: validation, path: en/c4-validation.*.json.gz}
- config_name: de
  data_files:
  - {split: train, path: de/*.json.gz}
---
"""
C4 = {
    "README.md": README,
    "en/c4-train.00000-of-01024.json.gz": lines(0, 50_000),
    "en/c4-train.00001-of-01024.json.gz": lines(50_000, 100),
    "en/c4-validation.00000-of-00008.json.gz": lines(90_000, 10),
    "de/c4-train.00000-of-00001.json.gz": lines(80_000, 5),
}
REPOSITORIES = {
    "allenai/c4": C4,
    "org/script": {"script.py": b"raise SystemExit('code of a dataset was run')\n"},
}


class Hub(ThreadingHTTPServer):
    """HTTP server on a free port of localhost. ``seen`` records the requested paths."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[str] = []
        self.tokens: set[str] = set()
        self.gone = False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def file_entry(file: str, data: bytes) -> dict[str, Any]:
    digest = hashlib.sha1(data).hexdigest()
    return {"type": "file", "path": file, "size": len(data), "oid": digest}


def folder_entry(folder: str) -> dict[str, Any]:
    return {"type": "directory", "path": folder, "oid": "0" * 40}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.seen.append(f"{self.command} {path}")
        self.server.tokens.add(self.headers.get("Authorization", ""))
        if self.server.gone:  # close the connection without an answer
            self.close_connection = True
            return None
        length = int(self.headers.get("Content-Length") or 0)
        self.posted = self.rfile.read(length)
        for owner, (status, headers) in REFUSALS.items():
            if f"/{owner}" in path:
                return self.answer(status, b'{"error": "refused"}', headers)
        for name, files in REPOSITORIES.items():
            if f"/datasets/{name}" in path:
                return self.repository(name, files, path)
        return self.answer(404, b'{"error": "no such thing"}', {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_POST = do_GET

    def repository(self, name: str, files: dict[str, bytes], path: str) -> None:
        if path.startswith(f"/datasets/{name}/resolve/"):
            file = path.split("/resolve/")[1].split("/", 1)[1]
            if file not in files:
                headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": SHA}
                return self.answer(404, b"", headers)
            return self.content(files[file])

        endpoint = path.removeprefix(f"/api/datasets/{name}").strip("/")
        if endpoint.startswith("paths-info"):
            return self.json(self.requested_entries(files))
        if endpoint.startswith("tree"):
            under = endpoint.split("/", 2)[2] + "/" if endpoint.count("/") > 1 else ""
            return self.json(self.entries_under(files, under))
        return self.json(
            {
                "id": name, "sha": SHA, "private": False, "disabled": False, "gated": False, "downloads": 0, "likes": 0,
                "tags": [], "siblings": [{"rfilename": file} for file in files],
            }
        )  # fmt: skip

    def requested_entries(self, files: dict[str, bytes]) -> list[dict[str, Any]]:
        """Return the entries of the files and folders that the request names."""
        requested = json.loads(self.posted)["paths"]
        entries = [file_entry(file, data) for file, data in files.items() if file in requested]
        folders = {"/".join(file.split("/")[:-1]) for file in files} - {""}
        entries += [folder_entry(folder) for folder in folders if folder in requested]
        return entries

    def entries_under(self, files: dict[str, bytes], under: str) -> list[dict[str, Any]]:
        """Return the entries below a folder: all files, or only its files and its folders."""
        files_under = {file: data for file, data in files.items() if file.startswith(under)}
        if "recursive=true" in self.path.lower():
            return [file_entry(file, data) for file, data in files_under.items()]
        entries = []
        folders = set()
        for file, data in files_under.items():
            first, *rest = file.removeprefix(under).split("/")
            if rest:
                folders.add(under + first)
            else:
                entries.append(file_entry(file, data))
        return entries + [folder_entry(folder) for folder in folders]

    def json(self, value: object) -> None:
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def content(self, data: bytes) -> None:
        etag = hashlib.sha1(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": SHA, "Accept-Ranges": "bytes"}
        span = self.headers.get("Range")
        if span:
            first, _, last = span.removeprefix("bytes=").partition("-")
            stop = min(int(last) + 1 if last else len(data), len(data))
            headers["Content-Range"] = f"bytes {first}-{stop - 1}/{len(data)}"
            return self.answer(206, data[int(first) : stop], headers)
        return self.answer(200, data, headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
