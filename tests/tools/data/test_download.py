"""Downloads are complete and verified, never print the token, and name a fix for every failure."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import re
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import huggingface_hub
import patience
import pytest
from hub_server import COMMIT, FILES, LARGE, TOKEN, WEIGHTS, FakeHub, Handler, served
from huggingface_hub import constants

from shardtrain import cli
from shardtrain.tools import hub_client
from shardtrain.tools.data import download
from shardtrain.utils.errors import ConfigError, DataError, ShardtrainError, StorageError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def hub(monkeypatch, tmp_path):
    yield from served(monkeypatch, tmp_path)


def run(folder: Path, *arguments: str) -> int:
    return download.main(["--repo_id", "org/name", "--local_dir", str(folder), *arguments])


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def complete_files(folder: Path) -> dict[str, bytes]:
    """Return the completed files, without the partial ones that remain after an error."""
    return {
        name: content for name, content in contents(folder).items() if download.STAGING not in name
    }


def fails(kind: type[ShardtrainError], folder: Path, *arguments: str) -> str:
    with pytest.raises(kind) as caught:
        run(folder, *arguments)
    text = str(caught.value)
    assert "\n" not in text
    assert TOKEN not in text
    assert "secretsignature" not in text
    return text


def test_only_the_tokenizer_s_files_are_downloaded(hub, tmp_path, capsys):
    assert run(tmp_path / "x") == 0
    assert contents(tmp_path / "x" / "name") == {
        name: FILES[name] for name in ("tokenizer.json", "tokenizer_config.json")
    }

    printed = capsys.readouterr().out
    assert f"org/name at {COMMIT}: 2 files" in printed
    assert "tokenizer.json: 13 B" in printed
    # all files from one commit
    assert all(f"/{COMMIT}/" in path for _, path, _ in hub.requests[1:])


def test_every_kind_of_asset_is_found_and_a_second_call_downloads_nothing(hub, tmp_path, capsys):
    assert run(tmp_path, "--all") == 0
    assert set(contents(tmp_path / "name")) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "config.json",
        "model.safetensors",
    }
    assert "index: none, the weights are one file" in capsys.readouterr().out

    before = len(hub.requests)
    assert run(tmp_path, "--assets", "safetensors", "config") == 0
    assert len(hub.requests) == before + 1
    assert capsys.readouterr().out.count("exists already") == 2


def test_tokenizer_path_is_the_folder_of_2024_s_scripts(hub, tmp_path):
    assert run(tmp_path / "x", "--tokenizer_path", "original") == 0
    assert contents(tmp_path / "x") == {
        "original/tokenizer.model": FILES["original/tokenizer.model"]
    }


def test_torchtitan_s_script_is_this_verb(hub, tmp_path):
    arguments = ["--repo_id", "org/name", "--assets", "config", "--local_dir", str(tmp_path / "x")]
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "download_hf_assets.py"), *arguments],
        cwd=tmp_path,
        env={**os.environ, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert contents(tmp_path / "x" / "name") == {"config.json": FILES["config.json"]}


def test_the_token_is_sent_to_the_hub_but_not_to_redirect_targets(
    hub, tmp_path, monkeypatch, capsys
):
    cdn = FakeHub()
    monkeypatch.setenv("HF_TOKEN", f" {TOKEN}\n")
    log = io.StringIO()
    for handler in logging.getLogger("huggingface_hub").handlers:
        monkeypatch.setattr(handler, "stream", log)
    hub.cdn = cdn.url
    assert run(tmp_path, "--assets", "safetensors") == 0
    assert {headers.get("authorization") for _, _, headers in hub.requests} == {f"Bearer {TOKEN}"}
    assert len(cdn.requests) == 1
    assert "authorization" not in cdn.requests[0][2]

    # Verify the hash from the hub, because the storage server may send other content.
    cdn.files["model.safetensors"] = WEIGHTS[:-1] + b"x"
    (tmp_path / "name" / "model.safetensors").unlink()
    assert "has the hash" in fails(DataError, tmp_path, "--assets", "safetensors")
    assert contents(tmp_path / "name") == {}

    cdn.close()
    assert "cannot be reached" in fails(StorageError, tmp_path, "--assets", "safetensors")
    # The library logs the URL without its signature.
    assert f"Error while downloading from {cdn.url}" in log.getvalue()

    printed = capsys.readouterr()
    for text in (printed.out, printed.err, log.getvalue()):
        assert TOKEN not in text
        assert "secretsignature" not in text


def test_the_token_of_a_login_is_found(hub, tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text(TOKEN)
    assert run(tmp_path / "x") == 0
    assert hub.requests[0][2]["authorization"] == f"Bearer {TOKEN}"

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    assert run(tmp_path / "x") == 0
    assert "authorization" not in hub.requests[-1][2]

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", False)
    (tmp_path / "home" / "token").write_bytes(b"\xff\xfe")
    assert "hf auth login" in fails(ConfigError, tmp_path)


@pytest.mark.parametrize(
    "arguments", [["--hf_token", TOKEN], [f"--hf_token={TOKEN}"], ["--hf-token", "x"], [TOKEN]]
)
def test_a_token_on_the_command_line_is_refused_and_not_repeated(hub, tmp_path, arguments):
    assert "HF_TOKEN" in fails(ConfigError, tmp_path, *arguments)
    assert hub.requests == []


def test_a_malformed_token_is_rejected_and_not_repeated(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", f"{TOKEN} {TOKEN}")
    assert "HF_TOKEN is not a token" in fails(ConfigError, tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    assert "unencrypted" in fails(ConfigError, tmp_path)


REFUSALS = {
    "gated": (
        401,
        {"X_Error_Code": "GatedRepo"},
        None,
        r"is gated; accept its license at https://huggingface.co/org/name",
    ),
    "gated for this account": (
        403,
        {"X_Error_Code": "GatedRepo"},
        TOKEN,
        "is gated; accept its license",
    ),
    "private": (
        401,
        {"X_Error_Code": "RepoNotFound"},
        None,
        "does not exist, or is private or gated; .* set HF_TOKEN",
    ),
    "expired": (401, {}, TOKEN, r"is not readable with the current token \(status 401\)"),
    "forbidden": (403, {}, TOKEN, r"\(status 403\)"),
    "absent": (404, {"X_Error_Code": "RepoNotFound"}, TOKEN, '--repo_id="org/name" does not exist'),
    "revision": (
        404,
        {"X_Error_Code": "RevisionNotFound"},
        None,
        '--revision="main" is not a revision of org/name',
    ),
}


# Test both requests: the file list of a gated repository is public, so only a file request may be refused.
@pytest.mark.parametrize("where", ["/api/", "/resolve/"])
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_of_the_hub_name_a_fix(hub, tmp_path, monkeypatch, name, where):
    status, headers, token, message = REFUSALS[name]
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    hub.fault = lambda handler, path: where in path and handler.refuse(status, **headers)
    text = fails(ConfigError, tmp_path)

    assert re.search(message, text), text
    assert len(hub.requests) == (1 if where == "/api/" else 2)


def test_a_busy_hub_is_reported_and_the_storage_server_is_retried(hub, tmp_path):
    hub.fault = lambda handler, path: handler.refuse(429, Retry_After="120")
    assert "is busy (too many requests, status 429); try again in 120 seconds" in fails(
        StorageError, tmp_path
    )

    hub.fault = lambda handler, path: handler.refuse(500)
    assert "an error of the hub, status 500" in fails(StorageError, tmp_path)
    answers = [429, 503]
    hub.fault = lambda handler, path: (
        "/resolve/" in path and bool(answers) and handler.refuse(answers.pop())
    )
    assert run(tmp_path) == 0
    assert answers == []


def test_a_hub_out_of_reach_is_reported(hub, tmp_path, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert "cannot be reached" in fails(StorageError, tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "ftp://x")

    assert "HF_ENDPOINT" in fails(ConfigError, tmp_path)


def test_offline_mode_is_respected(hub, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert 'HF_HUB_OFFLINE="1" forbids requests to the hub' in fails(ConfigError, tmp_path)
    assert hub.requests == []


def drip(handler: Handler, head: bytes) -> bool:
    """Send the header, then one byte every 20 ms until the test ends."""
    handler.wfile.write(head)
    try:
        while not handler.server.closing:
            handler.wfile.write(b"x")
            handler.wfile.flush()
            threading.Event().wait(0.02)
    except OSError:
        pass
    return True


IN_THE_HEAD = b"HTTP/1.0 200 OK\r\nX-"
IN_THE_CONTENT = b"HTTP/1.0 200 OK\r\nContent-Length: 9999999\r\n\r\n"


@pytest.mark.parametrize(
    ("method", "where", "head"),
    [
        ("GET", "/api/", IN_THE_HEAD),
        ("GET", "/api/", IN_THE_CONTENT),
        ("HEAD", "/resolve/", IN_THE_HEAD),
        ("GET", "/resolve/", IN_THE_CONTENT),
    ],
)
def test_a_hub_that_never_ends_its_answer_times_out(
    hub, tmp_path, monkeypatch, method, where, head
):
    """The library limits the time of a single read, so a slow server never reaches its timeout. Ours must apply."""
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    monkeypatch.setattr(hub_client, "STALLED_SECONDS", 0.4)
    hub.fault = lambda handler, path: (
        handler.command == method and where in path and drip(handler, head)
    )
    begun = time.monotonic()

    assert "cannot be reached" in fails(StorageError, tmp_path)
    # The limit is 0.4 seconds. A hang would never end.
    assert time.monotonic() - begun < patience.seconds(30)
    assert complete_files(tmp_path) == {}


def test_a_download_with_progress_does_not_time_out(tmp_path):
    """The limit is on the time without progress, not on the total time."""
    ended = threading.Event()
    numbers = iter(range(5))

    def progress() -> int:
        number = next(numbers, 9)
        if number == 4:
            ended.set()
        return number

    assert hub_client.bounded(lambda: ended.wait(patience.seconds(60)), 0.05, progress) is True


class _LateFuture(Future):
    """Future that completes at the moment when ``result`` times out."""

    def result(self, timeout: float | None = None):
        if timeout is None:
            return super().result()
        with contextlib.suppress(ValueError):
            super().result()
        raise TimeoutError


def test_a_call_that_ends_at_its_time_limit_returns_its_result(monkeypatch):
    monkeypatch.setattr(hub_client, "Future", _LateFuture)
    assert hub_client.bounded(lambda: 7, 0.05) == 7
    with pytest.raises(ValueError, match="of the call"):
        hub_client.bounded(lambda: int("of the call"), 0.05)


def test_log_messages_after_the_time_limit_are_not_printed(hub, capsys, monkeypatch):
    """The library still retries after our time limit. Its warnings must not follow our error line."""
    huggingface_hub.utils.logging.get_logger("huggingface_hub.file_download")
    handler = logging.StreamHandler(stream := io.StringIO())
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "handlers", [handler])
    hub_client.Hub("org/name")
    logger = logging.getLogger("huggingface_hub.file_download")
    timed_out = threading.Event()
    ended = threading.Event()

    def call() -> None:
        logger.warning("trying to resume")
        timed_out.wait(patience.seconds(60))
        logger.warning("trying to resume once more")
        ended.set()

    with pytest.raises(TimeoutError):
        hub_client.bounded(call, 0.2)

    timed_out.set()
    assert ended.wait(patience.seconds(60))
    logger.warning("of another call")
    assert stream.getvalue().splitlines() == ["trying to resume", "of another call"]


def test_the_time_limit_for_a_silent_hub_is_half_a_minute():
    assert 2 * constants.DEFAULT_ETAG_TIMEOUT <= 30


def test_a_lost_connection_continues_where_it_was(hub, tmp_path):
    cuts = [200_000, 500_000]

    def cut(handler: Handler, path: str) -> bool:
        if handler.command == "GET" and "/resolve/" in path and cuts:
            handler.give(WEIGHTS[: cuts.pop(0)], claimed_size=len(WEIGHTS))
            handler.wfile.flush()
            handler.connection.shutdown(socket.SHUT_RDWR)
            return True
        return False

    hub.fault = cut
    assert run(tmp_path, "--assets", "safetensors") == 0
    assert contents(tmp_path / "name") == {"model.safetensors": WEIGHTS}
    assert hub.fetched() == ["model.safetensors"] * 3


def test_a_connection_that_is_lost_again_and_again_ends_in_an_error(hub, tmp_path):
    hub.fault = lambda handler, path: (
        handler.command == "GET"
        and "/resolve/" in path
        and handler.give(b"", claimed_size=len(WEIGHTS))
    )

    assert "cannot be reached" in fails(StorageError, tmp_path, "--assets", "safetensors")
    assert complete_files(tmp_path) == {}


def test_a_hub_without_hashes_is_trusted_with_a_note(hub, tmp_path, capsys):
    hub.facts = lambda: [{"rfilename": "model.safetensors"}]
    assert run(tmp_path, "--assets", "safetensors") == 0
    assert contents(tmp_path / "name") == {"model.safetensors": WEIGHTS}
    assert "no hash known" in capsys.readouterr().out


# tokenizer.json has the hash of a git blob, model.safetensors that of an LFS file.
@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_corrupt_content_is_fetched_once_more_and_never_kept(hub, tmp_path, name):
    assets = ["--assets", "safetensors" if name in LARGE else "tokenizer"]
    correct = FILES[name]
    answers = [correct[:-1] + b"x"]

    def fault(handler: Handler, path: str) -> bool:
        if handler.command == "HEAD" or not path.endswith(name) or not answers:
            return False
        return handler.give(answers.pop() if len(answers) == 1 else answers[0])

    hub.fault = fault
    assert run(tmp_path, *assets) == 0
    assert contents(tmp_path / "name")[name] == correct
    assert hub.fetched().count(name) == 2

    (tmp_path / "name" / name).unlink()
    answers[:] = [correct[:-1] + b"y"] * 2  # the second download is corrupt, too
    assert f"{name} has the hash" in fails(DataError, tmp_path, *assets)

    for content in (correct[:-1], correct + b"x"):
        answers[:] = [content] * 2
        assert f"{name} does not have the size" in fails(DataError, tmp_path, *assets)
    assert name not in contents(tmp_path / "name")


@pytest.mark.parametrize(
    "cached", [FILES["config.json"], b'{"hidden_size": 9}'], ids=["intact", "damaged"]
)
def test_valid_files_in_the_library_s_cache_are_used(hub, tmp_path, cached):
    snapshot = tmp_path / "home" / "hub" / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes(cached)
    assert run(tmp_path, "--assets", "config") == 0
    assert contents(tmp_path / "name") == {"config.json": FILES["config.json"]}
    assert hub.fetched() == ([] if cached == FILES["config.json"] else ["config.json"])


def test_an_existing_file_stays_until_the_new_one_is_complete(hub, tmp_path):
    (tmp_path / "name").mkdir()
    for content in (b"old", FILES["tokenizer.json"][:-1] + b"x"):
        (tmp_path / "name" / "tokenizer.json").write_bytes(content)
        hub.fault = lambda handler, path: (
            handler.command == "GET" and "/resolve/" in path and handler.refuse(500)
        )
        fails(StorageError, tmp_path)

        assert complete_files(tmp_path / "name")["tokenizer.json"] == content

        hub.fault = lambda handler, path: False
        assert run(tmp_path) == 0
        assert contents(tmp_path / "name")["tokenizer.json"] == FILES["tokenizer.json"]


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/evil", "a\\..\\b"])
def test_a_name_outside_the_folder_is_rejected(hub, tmp_path, name):
    hub.files[name] = b"x"
    assert "is outside of its folder" in fails(ConfigError, tmp_path)


@pytest.mark.parametrize("content", [
    b"", b"[]", b"<html>", b'{"id": "x"}', b'{"id": "x", "siblings": 3}', b'{"id": "x", "siblings": [3]}',
    b"[" * 100_000,
])  # fmt: skip
def test_an_answer_that_is_not_a_list_of_files_is_reported(hub, tmp_path, content):
    hub.fault = lambda handler, path: handler.give(content)
    assert "did not return a list of the files" in fails(ConfigError, tmp_path)


@pytest.mark.parametrize("arguments", [
    ["--repo_id", "../x"], ["--repo_id", "a/b/c"], ["--repo_id", "a/.."], ["--repo_id", "a b"], ["--assets", "all"],
    ["--assets", "config", "--tokenizer_path", "original"], ["--tokenizer_path", "absent"], ["--local", "x"],
])  # fmt: skip
def test_wrong_options_are_reported_in_one_line(hub, tmp_path, arguments):
    message = fails(ConfigError, tmp_path, *arguments)
    assert arguments[-2] in message or arguments[-1] in message, (
        "the message must name the option or its value"
    )
    assert hub.fetched() == []


def test_a_kind_without_files_is_reported_with_the_existing_files(hub, tmp_path):
    del hub.files["config.json"], hub.files["model.safetensors"]
    message = fails(ConfigError, tmp_path, "--all")
    assert '--assets="config" matches no file of org/name, which has README.md, ' in message
    assert message.endswith("; check --repo_id, or request other assets")


def test_a_full_disk_is_reported_before_and_during_the_download(hub, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            download.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2**19})()
        )
        assert "has 512.00 KiB free, but the files need 750.03 KiB" in fails(
            StorageError, tmp_path, "--all"
        )
        assert hub.fetched() == []

    def full(*arguments: object, **options: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)

    assert "device (errno 28); free space, or name another --local_dir" in fails(
        StorageError, tmp_path
    )

    (tmp_path / "file").write_bytes(b"")
    assert "is a file, not a folder" in fails(ConfigError, tmp_path / "file")


def test_two_concurrent_downloads_do_not_mix_files(hub, tmp_path):
    (tmp_path / "name").mkdir()
    with download._staging(tmp_path / "name"):
        assert "is being written by another process" in fails(ConfigError, tmp_path)
    assert run(tmp_path) == 0


def test_help_names_every_option(capsys):
    assert cli.main(["data", "download", "--help"]) == 0
    printed = capsys.readouterr().out
    for text in ("--repo_id", "--assets", "HF_TOKEN", "--tokenizer_path"):
        assert text in printed


def test_only_a_download_imports_the_library():
    program = "import sys, shardtrain.cli, shardtrain.tools.data.download; sys.exit('huggingface_hub' in sys.modules)"
    subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, check=True, timeout=patience.seconds(60)
    )
