"""Other users of the machine can neither read nor change the communication between the ranks of a run."""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path

import patience
import pytest
import torch.distributed as dist
from tiers import cases

from shardtrain.distributed.rendezvous import attempt_store, private_store
from shardtrain.utils.errors import StorageError
from shardtrain.utils.process import STORE
from shardtrain.utils.redact import visible

NOBODY = 65534
TIMEOUT = timedelta(seconds=60)


def attack_read(folder: Path) -> object:
    return (folder / "store").read_bytes()


def attack_list(folder: Path) -> object:
    return os.listdir(folder)


def attack_set(folder: Path) -> object:
    return dist.FileStore(str(folder / "store"), -1).set("verdict", "x")


def attack_append(folder: Path) -> object:
    with (folder / "store").open("ab") as file:
        return file.write(b"\x1b]0;mine\x07" * 10**5)


def attack_delete(folder: Path) -> object:
    return (folder / "store").unlink()


def attack_replace(folder: Path) -> object:
    return (folder.parent / "other").rename(folder)


def attack_remove(folder: Path) -> object:
    return folder.rmdir()


def attack_chmod(folder: Path) -> object:
    return folder.chmod(0o777)


def attack_signs(folder: Path) -> object:
    return private_store.FolderStore(folder / "heartbeat").set("verdict", "{}")


def attack_link(folder: Path) -> object:
    return (folder / "heartbeat/verdict").symlink_to("/dev/zero")


def attack_pipe(folder: Path) -> object:
    return os.mkfifo(folder / "heartbeat/sign-0")


def attack_lock(folder: Path) -> object:
    import fcntl

    with (folder / "store").open("rb") as file:
        return fcntl.flock(file, fcntl.LOCK_EX)


def attack_hard_link(folder: Path) -> object:
    return os.link(folder / "store", folder.parent / "mine")


def attack_truncate(folder: Path) -> object:
    return os.truncate(folder / "store", 0)


ATTACKS = [value for name, value in sorted(globals().items()) if name.startswith("attack_")]


def as_nobody(function: Callable[[], object]) -> bool:
    """Call a function as another user. Return True if it succeeds."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            function()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
@pytest.mark.parametrize("attack", cases(ATTACKS[:2], nightly=ATTACKS[2:]))
def test_another_user_cannot_access_the_rendezvous_folder(
    attack: Callable[[Path], object], tmp_path: Path
) -> None:
    # The attacker can reach the parent folder, but not the rendezvous folder.
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    folder = tmp_path / "rendezvous"
    folder.mkdir(mode=0o700)
    store = private_store.group_store(folder)
    signs = private_store.FolderStore(folder / "heartbeat")
    store.set("key", "value")
    num_keys = store.num_keys()
    signs.set("sign-0", "well")
    (tmp_path / "reachable").write_text("x")

    assert as_nobody(lambda: (tmp_path / "reachable").read_text()), (
        "the attacker cannot even reach the parent folder"
    )
    assert not as_nobody(lambda: attack(folder))

    # The attack changed nothing.
    assert store.get("key") == b"value"
    assert signs.get("sign-0") == b"well"
    assert store.num_keys() == num_keys
    assert not signs.check(["verdict"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_rendezvous_folder_open_to_others_is_refused(mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(StorageError, match="must belong to this user and have mode 0700"):
        private_store.folder_of({STORE: str(tmp_path)})


def test_link_to_a_rendezvous_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(StorageError, match="must belong to this user and have mode 0700"):
        private_store.folder_of({STORE: str(tmp_path / "link")})


def test_folder_store_counts_and_sets_values_atomically(tmp_path: Path) -> None:
    store = private_store.FolderStore(tmp_path / "signs")

    def add_twenty() -> None:
        for _ in range(20):
            store.add("n", 1)

    threads = [threading.Thread(target=add_twenty) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert store.add("n", 0) == 80
    assert store.compare_set("v", "", "first") == b"first"
    assert store.compare_set("v", "", "second") == b"first"


def test_process_forked_during_a_change_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A data worker may be forked while another thread changes the store."""
    store = private_store.FolderStore(tmp_path / "signs")
    children: list[BaseProcess] = []

    def fork(_: bytes) -> bytes:
        children.append(multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)))
        children[0].start()
        return b"1"

    try:
        store._change("n", fork)
        other = threading.Thread(target=store.add, args=("n", 1), daemon=True)
        other.start()
        other.join(patience.seconds(10))
        assert not other.is_alive()
        assert children[0].is_alive()
        assert store.get("n") == b"2"
    finally:
        children[0].kill()


def test_terminal_control_sequences_are_escaped() -> None:
    text = "a\x1b[31mred\x1b]0;title\x07\r\x9b1m\u202eb\u2028\ud800\nc\td"
    shown = visible(text, lines=False)
    assert shown == "a\\x1b[31mred\\x1b]0;title\\x07\\x0d\\x9b1m\\u202eb\\u2028\\ud800\\nc\td"
    assert visible("\x1b[1;31mred\x1b[0m\x1b[2J", colors=True) == "\x1b[1;31mred\x1b[0m\\x1b[2J"


def test_variable_with_newlines_and_escapes_is_reported_in_one_line(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "RANK": "0\nerror[0]: all is well\x1b[2J",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
    }
    command = [sys.executable, "-m", "shardtrain", "train", "--job.dump_folder", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]

    assert done.returncode == 2, done.stderr
    assert len(errors) == 1, done.stderr
    assert "RANK" in errors[0], done.stderr
    assert "\x1b" not in done.stderr


def test_socket_instead_of_a_rendezvous_folder_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(StorageError, match="must belong to this user and have mode 0700"):
            private_store.folder_of({STORE: str(tmp_path / "s")})


def launched(tmp_path: Path, **more: str) -> dict[str, str]:
    """Return the environment that torchrun sets for a rank on a single machine."""
    (tmp_path / "runtime").mkdir(mode=0o700, exist_ok=True)
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "XDG_RUNTIME_DIR": str(tmp_path / "runtime"),
        **more,
    }


def test_ranks_of_another_launcher_on_one_machine_meet_in_a_private_folder(tmp_path: Path) -> None:
    environments = [
        {**launched(tmp_path), "RANK": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for rank in range(2)
    ]
    attempts_of_ranks = {}
    for attempt in range(2):
        joined = threading.Barrier(2)

        def rank_main(
            rank: int, attempt: int = attempt, joined: threading.Barrier = joined
        ) -> None:
            environment = dict(environments[rank])
            # nothing listens on that port, so this fails if it uses the launcher's store
            with attempt_store.store_of_attempt(environment, TIMEOUT) as store:
                assert store is not None
                store.set(f"address/{rank}", str(attempt))
                attempts_of_ranks[rank] = [int(store.get(f"address/{other}")) for other in range(2)]
                assert private_store.folder_of(environment)
                joined.wait(patience.seconds(60))

        threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in (1, 0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(patience.seconds(120))

        assert attempts_of_ranks == {0: [attempt] * 2, 1: [attempt] * 2}

    assert len(list((tmp_path / "runtime/shardtrain").iterdir())) == 1


def test_ranks_on_several_nodes_meet_at_the_address(tmp_path: Path) -> None:
    assert private_store.folder_of_launcher(launched(tmp_path, WORLD_SIZE="4")) is None


def test_folder_open_to_others_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    taken = tmp_path / "temporary" / f"shardtrain-{os.geteuid()}"
    taken.mkdir(parents=True, mode=0o777)
    taken.chmod(0o777)
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime/shardtrain").symlink_to(taken)
    folder = private_store.folder_of_launcher(launched(tmp_path))

    assert folder
    assert folder.is_relative_to(tmp_path / "home")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_sweep_ignores_files_that_disappear(tmp_path: Path) -> None:
    """Other ranks may rename a file or remove a folder after it was listed. A dangling link stands for such a file."""
    folder = private_store.folder_of_launcher(launched(tmp_path))
    other = private_store.folder_of_launcher(launched(tmp_path, MASTER_PORT="29501"))
    assert folder
    assert other

    for parent in (folder, other):
        (parent / "gone").symlink_to(tmp_path / "nowhere")
    private_store.sweep(folder)
    assert folder.exists()
    assert other.exists()
