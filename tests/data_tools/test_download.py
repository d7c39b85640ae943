"""Laws of the download: files arrive whole and checked, the token stays secret, every failure says what to do."""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import socket
import threading
import time
from pathlib import Path

import patience
import pytest

from shardtrain.data_tools import _hub, download
from shardtrain.errors import ConfigError, DataError, ShardtrainError, StorageError

TOKEN = "hf_canary0123456789abcdef"
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
        self.requests: list[tuple[str, dict[str, str]]] = []
        self.fault = lambda handler, path: False
        self.commit = "c0ffee"
        self.cdn: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that leave early are part of the tests."""

    def facts(self) -> list[dict[str, object]]:
        found = []
        for name, content in self.files.items():
            one = {"rfilename": name, "size": len(content)}
            blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            if name in LARGE:
                one["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            found.append({**one, "blobId": blob})
        return found


class Handler(http.server.BaseHTTPRequestHandler):
    server: FakeHub

    def log_message(self, *arguments: object) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self.server.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        if self.server.fault(self, self.path):
            return
        if self.path.startswith("/api/models/"):
            self.give(json.dumps({"sha": self.server.commit, "siblings": self.server.facts()}).encode())
        else:
            name = self.path.split("/resolve/", 1)[1].split("/", 1)[1]
            etag = hashlib.sha256(self.server.files[name]).hexdigest()
            if self.server.cdn:
                self.send_response(302)
                self.send_header("Location", f"{self.server.cdn}/x/resolve/y/{name}")
                self.send_header("X-Linked-Etag", f'"{etag}"')
                self.send_header("Content-Length", "0")
                self.end_headers()
            else:
                self.give(self.server.files[name])

    def give(self, content: bytes, told: int | None = None, **headers: str) -> None:
        start = int(self.headers.get("Range", "bytes=0-")[6:-1])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str((told or len(content)) - start))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content[start:])

    def refuse(self, status: int, **headers: str) -> bool:
        self.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        return True


@pytest.fixture
def hub(monkeypatch, tmp_path):
    server = FakeHub()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    for name in ("HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(_hub.time, "sleep", lambda seconds: None)  # no test waits out a pause
    yield server
    server.shutdown()
    server.server_close()


def run(folder: Path, *words: str) -> int:
    return download.main(["--repo_id", "org/name", "--local_dir", str(folder), *words])


def left(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def fails(kind: type[ShardtrainError], folder: Path, *words: str) -> str:
    with pytest.raises(kind) as caught:
        run(folder, *words)
    text = str(caught.value)
    assert "\n" not in text and TOKEN not in text
    return text


def test_the_tokenizer_s_files_arrive_and_nothing_else(hub, tmp_path, capsys):
    assert run(tmp_path / "x") == 0
    assert left(tmp_path / "x" / "name") == {name: FILES[name] for name in ("tokenizer.json", "tokenizer_config.json")}
    assert "tokenizer.json: 13 B" in capsys.readouterr().out
    assert all("/c0ffee/" in path for path, _ in hub.requests[1:])  # all files of one commit


def test_every_kind_of_asset_is_found_and_a_second_call_brings_nothing_anew(hub, tmp_path, capsys):
    assert run(tmp_path, "--all") == 0
    assert set(left(tmp_path / "name")) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "model.safetensors",
    }
    assert "index: none, the weights are one file" in capsys.readouterr().out
    before = len(hub.requests)
    assert run(tmp_path, "--assets", "safetensors", "config") == 0
    assert len(hub.requests) == before + 1
    assert capsys.readouterr().out.count("is there already") == 2


def test_tokenizer_path_is_the_folder_of_2024_s_scripts(hub, tmp_path):
    assert run(tmp_path / "x", "--tokenizer_path", "original") == 0
    assert left(tmp_path / "x") == {"original/tokenizer.model": FILES["original/tokenizer.model"]}


def test_the_token_goes_to_the_hub_and_not_where_it_redirects_to(hub, tmp_path, monkeypatch, capsys):
    cdn = FakeHub()
    threading.Thread(target=cdn.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    monkeypatch.setenv("HF_TOKEN", f" {TOKEN}\n")
    hub.cdn = cdn.url
    assert run(tmp_path, "--assets", "safetensors") == 0
    assert [headers.get("authorization") for _, headers in hub.requests] == [f"Bearer {TOKEN}"] * 2
    assert len(cdn.requests) == 1 and "authorization" not in cdn.requests[0][1]
    printed = capsys.readouterr()
    assert TOKEN not in printed.out + printed.err
    cdn.files["model.safetensors"] = WEIGHTS[:-1] + b"x"  # the hub's own word counts, not that of who stores the file
    (tmp_path / "name" / "model.safetensors").unlink()
    assert "has the hash" in fails(DataError, tmp_path, "--assets", "safetensors")
    assert left(tmp_path / "name") == {}
    cdn.shutdown()
    cdn.server_close()


def test_the_token_of_a_login_is_found(hub, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(TOKEN)
    assert run(tmp_path / "x") == 0
    assert hub.requests[0][1]["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.parametrize("words", [["--hf_token", TOKEN], [f"--hf_token={TOKEN}"], ["--hf-token", "x"], [TOKEN]])
def test_a_token_on_the_command_line_is_refused_and_not_repeated(hub, tmp_path, words):
    assert "HF_TOKEN" in fails(ConfigError, tmp_path, *words)
    assert hub.requests == []


def test_a_token_that_cannot_be_one_is_refused_and_not_repeated(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN} {TOKEN}")
    assert "HF_TOKEN holds no token" in fails(ConfigError, tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    assert "without encryption" in fails(ConfigError, tmp_path)


REFUSALS = {
    "gated": (
        401,
        {"X_Error_Code": "GatedRepo"},
        None,
        r"is gated; accept its licence at https://huggingface.co/org/name",
    ),
    "gated for this account": (403, {"X_Error_Code": "GatedRepo"}, TOKEN, "is gated; accept its licence"),
    "private": (401, {"X_Error_Code": "RepoNotFound"}, None, "does not exist, or is private or gated; .* set HF_TOKEN"),
    "expired": (401, {}, TOKEN, r"may not be read with the token that was found \(status 401\)"),
    "forbidden": (403, {}, TOKEN, r"\(status 403\)"),
    "absent": (404, {"X_Error_Code": "RepoNotFound"}, TOKEN, '--repo_id="org/name" does not exist'),
    "revision": (404, {"X_Error_Code": "RevisionNotFound"}, None, '--revision="main" is no revision of org/name'),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_what_to_do(hub, tmp_path, monkeypatch, name):
    status, headers, token, message = REFUSALS[name]
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.fault = lambda handler, path: handler.refuse(status, **headers)
    text = fails(ConfigError, tmp_path)
    assert re.search(message, text), text
    assert len(hub.requests) == 1


def test_a_busy_hub_is_asked_again_and_a_long_wait_is_told(hub, tmp_path):
    answers = [429, 503]
    hub.fault = lambda handler, path: bool(answers) and handler.refuse(answers.pop(), Retry_After="1")
    assert run(tmp_path) == 0
    hub.fault = lambda handler, path: handler.refuse(429, Retry_After="120")
    assert "asks to wait 120 seconds (too many requests, status 429)" in fails(StorageError, tmp_path)
    before = len(hub.requests)
    hub.fault = lambda handler, path: handler.refuse(500)
    assert "a fault of the hub, status 500" in fails(StorageError, tmp_path)
    assert len(hub.requests) == before + _hub.ATTEMPTS


def test_a_hub_out_of_reach_is_told(hub, tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert "cannot be reached" in fails(StorageError, tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "ftp://x")
    assert "HF_ENDPOINT" in fails(ConfigError, tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    assert "HF_HUB_OFFLINE" in fails(ConfigError, tmp_path)
    assert hub.requests == []


def drip(handler: Handler, head: bytes) -> bool:
    """Send a byte now and then, for ever."""
    handler.wfile.write(head)
    try:
        while True:
            handler.wfile.write(b"x")
            handler.wfile.flush()
            threading.Event().wait(0.05)
    except OSError:
        return True


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\nX-", b"HTTP/1.0 200 OK\r\nContent-Length: 9999999\r\n\r\n"])
@pytest.mark.parametrize("where", ["/api/", "/resolve/"])
def test_a_slow_hub_is_left(hub, tmp_path, monkeypatch, head, where):
    monkeypatch.setattr(_hub.Hub.__init__, "__defaults__", ("main", 0.4))
    hub.fault = lambda handler, path: where in path and drip(handler, head)
    begun = time.monotonic()
    assert "cannot be reached" in fails(StorageError, tmp_path)
    # 0.4 seconds of silence are allowed; a hang would last for ever
    assert time.monotonic() - begun < patience.seconds(30)
    assert [name for name in left(tmp_path) if not name.endswith(".part")] == []


def test_a_hub_may_be_silent_for_less_than_ten_seconds():
    assert _hub.LONGEST_SILENCE_SECONDS < 10
    assert _hub.LONGEST_WAIT_SECONDS * _hub.ATTEMPTS < 10


def test_a_lost_connection_goes_on_where_it_was(hub, tmp_path):
    cuts = [200_000, 500_000]

    def cut(handler: Handler, path: str) -> bool:
        if "/resolve/" in path and cuts:
            handler.give(WEIGHTS[: cuts.pop(0)], told=len(WEIGHTS))
            handler.wfile.flush()
            handler.connection.shutdown(socket.SHUT_RDWR)
            return True
        return False

    hub.fault = cut
    assert run(tmp_path, "--assets", "safetensors") == 0
    assert left(tmp_path / "name") == {"model.safetensors": WEIGHTS}
    assert [headers.get("range") for _, headers in hub.requests[1:]] == [None, "bytes=200000-", "bytes=500000-"]


def test_a_connection_that_is_lost_again_and_again_ends_in_an_error(hub, tmp_path):
    facts = hub.facts
    for known in (True, False):
        hub.facts = facts if known else lambda: [{"rfilename": "model.safetensors"}]  # a hub that tells no hashes
        hub.fault = lambda handler, path: "/resolve/" in path and (handler.give(b"x", told=10**6) or True)
        assert "cannot be reached" in fails(StorageError, tmp_path, "--assets", "safetensors")


def test_a_hub_without_hashes_is_believed_and_that_is_told(hub, tmp_path, capsys):
    hub.facts = lambda: [{"rfilename": "model.safetensors"}]
    assert run(tmp_path, "--assets", "safetensors") == 0
    assert left(tmp_path / "name") == {"model.safetensors": WEIGHTS}
    assert "no hash known" in capsys.readouterr().out


def test_a_part_of_an_earlier_call_is_gone_on_with_and_a_wrong_one_begun_anew(hub, tmp_path):
    part = tmp_path / "name" / ".model.safetensors.part"
    part.parent.mkdir()
    for content, ranges in ((WEIGHTS[:1000], ["bytes=1000-"]), (b"x" * 1000, ["bytes=1000-", None])):
        part.write_bytes(content)
        hub.requests.clear()
        assert run(tmp_path, "--assets", "safetensors") == 0
        assert left(tmp_path / "name") == {"model.safetensors": WEIGHTS}
        assert [headers.get("range") for _, headers in hub.requests[1:]] == ranges
        (tmp_path / "name" / "model.safetensors").unlink()


def test_a_wrong_content_is_not_kept(hub, tmp_path):
    hub.fault = lambda handler, path: "/resolve/" in path and (handler.give(b'{"model": []}') or True)
    assert "tokenizer.json has the hash" in fails(DataError, tmp_path)
    hub.fault = lambda handler, path: "/resolve/" in path and (handler.give(b"{}") or True)
    assert "has 2 bytes in place of 13" in fails(DataError, tmp_path)
    hub.fault = lambda handler, path: "/resolve/" in path and (handler.give(b"x" * 99) or True)
    assert "is longer than the 13 bytes" in fails(DataError, tmp_path)
    assert left(tmp_path) == {}


def test_a_file_that_was_there_stays_until_the_new_one_is_whole(hub, tmp_path):
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "tokenizer.json").write_bytes(b"old")
    hub.fault = lambda handler, path: "/resolve/" in path and handler.refuse(500)
    fails(StorageError, tmp_path)
    assert left(tmp_path / "name")["tokenizer.json"] == b"old"
    hub.fault = lambda handler, path: False
    assert run(tmp_path) == 0
    assert left(tmp_path / "name")["tokenizer.json"] == FILES["tokenizer.json"]


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/evil", "a\\..\\b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(hub, tmp_path, name):
    hub.files[name] = b"x"
    assert "leads out of its folder" in fails(ConfigError, tmp_path)


@pytest.mark.parametrize("content", [b"", b"[]", b"<html>", b'{"siblings": 3}', b'{"siblings": [3]}', b"[" * 100_000])
def test_an_answer_that_is_no_list_of_files_is_told(hub, tmp_path, content):
    hub.fault = lambda handler, path: handler.give(content) or True
    assert "gave no list of files" in fails(ConfigError, tmp_path)


@pytest.mark.parametrize("words", [
    ["--repo_id", "../x"], ["--repo_id", "a/b/c"], ["--repo_id", "a/.."], ["--repo_id", "a b"], ["--assets", "all"],
    ["--assets", "config", "--tokenizer_path", "original"], ["--tokenizer_path", "absent"], ["--local", "x"],
])  # fmt: skip
def test_wrong_options_are_told_in_one_line(hub, tmp_path, words):
    fails(ConfigError, tmp_path, *words)


def test_a_kind_without_files_is_told_with_the_files_there_are(hub, tmp_path):
    del hub.files["config.json"], hub.files["model.safetensors"]
    assert '--assets="config" finds nothing in org/name; its files are README.md' in fails(
        ConfigError, tmp_path, "--all"
    )


def test_two_at_once_do_not_mix_their_files(hub, tmp_path):
    import fcntl

    part = tmp_path / "name" / ".tokenizer.json.part"
    part.parent.mkdir()
    with part.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "is being written by another process" in fails(ConfigError, tmp_path)


def test_help_names_every_option(capsys):
    assert download.main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("--repo_id", "--assets", "HF_TOKEN", "--tokenizer_path"))
