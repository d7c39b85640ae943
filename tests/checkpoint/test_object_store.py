"""Checkpoints in an object store: whole or not there, whatever call fails and wherever a run is killed."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from ranks import run_ranks
from safetensors.torch import load_file
from small_checkpoint import checkpoints, facts, rest, save, weights, world_of_one

from shardtrain.checkpoint import lease, objects
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.objects import ObjectPath
from shardtrain.checkpoint.storage import place
from shardtrain.config import Loaded
from shardtrain.config.rules import check
from shardtrain.config.schema import Checkpoint, Config
from shardtrain.launch import signals
from shardtrain.tools import checkpoint_command
from shardtrain.utils.errors import CheckpointError, ConfigError, StorageError

FOLDER = "memory://bucket/run"


@pytest.fixture(autouse=True)
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    """An empty store, and a world of one where the test forks none of its own; no lease outlives the test."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    with contextlib.nullcontext() if "ranks" in request.node.name else world_of_one():
        yield
    while OPENED:
        die(OPENED.pop())


OPENED: list[Checkpoints] = []


def stored(**options: Any) -> Checkpoints:
    OPENED.append(checkpoints(Path("unused"), folder=FOLDER, **options))
    return OPENED[-1]


def die(kept: Checkpoints) -> None:
    """As a process that is dead: its lease is neither renewed nor given back."""
    kept._lease._ended.set()  # type: ignore[union-attr]
    atexit.unregister(kept._lease.release)


def names() -> list[str]:
    return sorted(name.removeprefix("/bucket/run/") for name in MemoryFileSystem.store)


def step_loaded(step: int) -> None:
    """Load a step with all checks, and compare every element with what its number says."""
    mine, other = weights(-1), rest(-1)
    found = stored(load_only=True).load(place(f"{FOLDER}/step-{step}"), mine, other)
    assert found["state"] == {"step": step}
    for tensors, expected in ((mine, weights(step)), (other, rest(step))):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_what_was_saved_is_found_and_loaded() -> None:
    kept = stored(keep_latest_k=2)
    assert kept.to_continue() is None
    for step in (5, 10, 100):
        save(kept, step)
    assert kept.steps() == [10, 100]
    assert str(kept.to_continue()) == f"{FOLDER}/step-100"
    assert str(signals.newest_checkpoint(place(FOLDER))) == f"{FOLDER}/step-100"
    step_loaded(10)
    step_loaded(100)
    kept.close()
    assert [name.partition("/")[2].partition("-")[0] for name in names()] == ["manifest.json", "rank"] * 2
    assert not Path("unused").exists()


def test_a_step_saved_again_replaces_the_old_one_and_leaves_nothing_of_it() -> None:
    kept = stored()
    save(kept, 3)
    old = names()
    kept.save(3, weights(8), rest(8), facts(8), last=False)
    mine = weights(-1)
    stored(load_only=True).load(place(f"{FOLDER}/step-3"), mine, {})
    assert torch.equal(mine["model.b"], torch.tensor(8.0))
    assert len(names()) == len(old) and names() != old


def test_steps_saved_again_count_among_those_that_are_kept() -> None:
    """Their manifests have the size of the old ones, and name other files."""
    kept = stored(keep_latest_k=2)
    for step in (11, 12, 13, 12, 13, 14):
        save(kept, step)
    assert kept.steps() == [13, 14]


@pytest.mark.parametrize(("folder", "requests"), [("run", 1), ("run[1]", 0), ("run*", 0), ("r?n", 0)])
def test_what_is_deleted_is_one_request_and_never_what_a_name_matches(folder, requests, monkeypatch) -> None:
    other = [f"memory://bucket/run1/step-3/rank-{rank}.bin" for rank in range(3)]
    own = [f"memory://bucket/{folder}/step-3/rank-{rank}.bin" for rank in range(3)]
    store = MemoryFileSystem()
    for address in (*other, *own):
        store.pipe_file(address, b"bytes")
    asked: list[Any] = []
    remove = MemoryFileSystem.rm
    monkeypatch.setattr(MemoryFileSystem, "rm", lambda self, keys: (asked.append(keys), remove(self, keys)))
    objects.unlink_all([ObjectPath(store, address) for address in own])
    assert len(asked) == requests
    assert names() == [name.removeprefix("memory:/") for name in other]
    objects.unlink_all([])


def test_a_store_that_deletes_no_more_than_one_is_asked_for_each(monkeypatch) -> None:
    def refuse(*_: Any) -> None:
        raise NotImplementedError("DeleteObjects")

    store = MemoryFileSystem()
    paths = [ObjectPath(store, f"{FOLDER}/rank-{rank}.bin") for rank in range(3)]
    for path in paths:
        store.pipe_file(path.address, b"bytes")
    monkeypatch.setattr(MemoryFileSystem, "rm", refuse)
    objects.unlink_all(paths)
    assert not names()


def test_without_a_manifest_there_is_no_checkpoint_and_what_is_left_is_swept() -> None:
    kept = stored()
    save(kept, 3)
    kept.close()
    MemoryFileSystem.store.pop("/bucket/run/step-3/manifest.json")
    (place(FOLDER) / "step-3" / "notes.txt").put(b"of the user", new=True)
    with pytest.raises(CheckpointError, match="has no such step, nor any other"):
        stored(load_step=3, load_only=True).to_continue()
    again = stored()
    assert again.to_continue() is None
    again.close()
    assert names() == ["step-3/notes.txt"]


def test_damage_is_found_and_skipped() -> None:
    kept = stored()
    for step in (2, 4):
        save(kept, step)
    (name,) = [name for name in names() if name.startswith("step-4/rank")]
    whole = (place(FOLDER) / name).read_bytes()
    for spoilt in (whole[:-1], whole + b"0", bytes([whole[0] ^ 1]) + whole[1:]):
        (place(FOLDER) / name).put(spoilt, new=False)
        assert str(kept.to_continue()) == f"{FOLDER}/step-2"
    with pytest.raises(CheckpointError, match="rank-00000-"):
        stored(load_step=4, load_only=True).to_continue()


# -- one writer --------------------------------------------------------------------------------------------------------


def as_other_host(**fields: Any) -> None:
    path = place(FOLDER) / lease.LEASE
    path.put(json.dumps({**json.loads(path.read_bytes()), "nonce": "ab", **fields}).encode(), new=False)


def test_a_lease_of_a_living_run_is_refused_and_one_that_was_taken_stops_its_loser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = stored()
    first.to_continue()
    save(first, 1)
    as_other_host(pid=1, process_start=lease._process_start(1))
    with pytest.raises(ConfigError, match=r"checkpoint\.folder: memory://bucket/run is being written by process 1"):
        stored().to_continue()
    with pytest.raises(ConfigError, match="was taken over by"):
        save(first, 2)
    assert first.steps() == [1]


def test_a_store_that_cannot_refuse_a_second_writer_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    whole = fsspec.filesystem("memory")

    class Plain:
        """A store without conditional writes."""

        def __getattr__(self, name: str) -> Any:
            return getattr(whole, name)

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
            if mode != "overwrite":
                raise ValueError(mode)
            whole.pipe_file(path, value)

    with caplog.at_level("INFO"):
        stored().to_continue()
        assert "cannot refuse" not in caplog.text
        whole.rm(f"{FOLDER}/{lease.LEASE}")
        on(Plain()).to_continue()
    assert caplog.text.count("this store cannot reject a second writer") == 1


def test_a_lease_of_another_host_is_taken_when_it_shows_no_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    first = stored()
    first.to_continue()
    as_other_host(host="elsewhere")
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.1)
    second = stored()
    second.to_continue()
    save(second, 1)
    second.close()
    assert not any(name == lease.LEASE for name in names())

    third = stored()
    third.to_continue()
    as_other_host(host="elsewhere", beats=0)
    beats, read_bytes = itertools.count(1), ObjectPath.read_bytes

    def beating(path: ObjectPath) -> bytes:
        found = read_bytes(path)
        return json.dumps({**json.loads(found), "beats": next(beats)}).encode() if path.name == lease.LEASE else found

    monkeypatch.setattr(ObjectPath, "read_bytes", beating)
    with pytest.raises(ConfigError, match="is being written by .* on elsewhere"):
        stored().to_continue()


# -- faults ------------------------------------------------------------------------------------------------------------

CALLS = ("ls", "info", "cat_file", "pipe_file", "rm_file", "open", "write", "close")


class Killed(BaseException):
    """The end of a process: nothing that it calls happens any more."""


class FaultyStore:
    """The store in memory, of which the n-th call fails before it happens, or after."""

    def __init__(self, number: int, failure: Callable[[], BaseException], late: bool = False) -> None:
        self.whole = fsspec.filesystem("memory")
        self.number, self.failure, self.late, self.calls = number, failure, late, 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.whole, name)
        return self.watched(found) if name in CALLS else found

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            fails = self.calls == self.number or (self.calls > self.number and self.failure is Killed)
            if fails and not self.late:
                raise self.failure()
            answer = call(*arguments, **options)
            if fails:
                raise self.failure()
            return FaultyFile(self, answer) if hasattr(answer, "commit") else answer

        return watch


class FaultyFile:
    """A file of it, which has its bytes in the store only when it is closed, as in stores that upload in parts."""

    def __init__(self, store: FaultyStore, file: Any) -> None:
        self.data, self.key = bytearray(), file.path
        self.write, self.close = store.watched(self.data.extend), store.watched(self.commit)
        store.whole.store.pop(self.key, None)

    def commit(self) -> None:
        fsspec.filesystem("memory").pipe_file(self.key, bytes(self.data))


def on(store: Any, **options: Any) -> Checkpoints:
    """Checkpoints of one process, whose every call goes through ``store``."""
    kept = stored(**options)
    for holder in (kept._storage, kept):
        for name in ("folder", "_folder"):
            if hasattr(holder, name):
                setattr(holder, name, ObjectPath(store, FOLDER))
    kept._lease._object = kept._lease._path = ObjectPath(store, f"{FOLDER}/{lease.LEASE}")
    return kept


def failures() -> list[Callable[[], BaseException]]:
    return [
        lambda: OSError("the service is not available"),  # as s3fs: no number
        lambda: PermissionError("Access Denied"),
        lambda: RuntimeError("HttpError 503"),  # as gcsfs: no OSError
    ]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_no_error_of_any_call_is_a_success_or_harms_what_was_there(late: bool) -> None:
    """``after``: the store has done what was asked, and the answer was lost on the way."""
    step, refused = 2, 0
    with_deletes = stored(keep_latest_k=2)
    for first in (1, 2):
        save(with_deletes, first)
    with_deletes.close()
    counter = FaultyStore(10**9, Killed)
    kept = on(counter, keep_latest_k=2)
    kept.to_continue()
    begun = counter.calls
    save(kept, 3)
    kept.close()
    for number, failure in itertools.product(range(begun + 1, counter.calls + 1), failures()):
        step += 1
        store = FaultyStore(10**9, failure, late)
        kept = on(store, keep_latest_k=2)
        kept.to_continue()
        before, store.number = kept.steps(), number
        store.calls = begun
        try:
            save(kept, step)
            told = ""
        except (StorageError, CheckpointError) as error:
            told = str(error)
        store.number = -1
        newest = stored().steps()[-1]
        assert newest == step or (told and newest == before[-1]), (number, told)
        step_loaded(newest)
        if told:
            refused += 1
            assert FOLDER in told and "\n" not in told and "errno" in told, told
        kept.close()
    assert refused > 10


def test_a_kill_at_any_call_leaves_the_newest_that_was_said_to_be_saved() -> None:
    newest = 0
    # in the first 30 calls, most of which find and sweep, and then in all of those of three saves
    for number in (*range(1, 30), *range(101, 300)):
        store = FaultyStore(number, Killed)
        kept = on(store, keep_latest_k=2)
        told = newest
        try:
            kept.to_continue()
            store.calls = max(store.calls, 100)
            for step in range(newest + 1, newest + 4):
                save(kept, step)
                told = step
        except Killed:
            pass
        if store.calls < number:  # three saves took fewer calls: all have been tried
            kept.close()
            break
        die(kept)
        found = stored(load_only=True).to_continue()
        newest = int(found.name[5:]) if found else 0
        assert newest in (told, told + 1)
        for step in stored().steps():
            step_loaded(step)
    assert newest > 20 and 150 < number < 299
    last = stored()
    last.to_continue()
    last.close()
    assert all(name.startswith(tuple(f"step-{step}/" for step in last.steps())) for name in names()), "swept"


# -- more than one rank, and the command -------------------------------------------------------------------------------


def save_and_load(rank: int, root: Path) -> list[list[float]]:
    """A store that two processes see: fsspec's own view of a folder."""
    import torch.distributed as dist

    kept = Checkpoints(Config(checkpoint=Checkpoint(enable=True, folder=f"local://{root}/bucket")))
    (root / "bucket/step-4").mkdir(parents=True, exist_ok=True)
    own = {f"model.{rank}": torch.full((100,), float(rank))}
    kept.save(4, own, {}, {"state": {"step": 4}}, last=False)
    found = kept.to_continue()
    other = {f"model.{1 - rank}": torch.zeros(100)}
    both = {**{name: torch.zeros(100) for name in own}, **other}
    assert found is not None
    kept.load(found, both, {})
    dist.barrier()
    kept.close()
    return [both[f"model.{number}"].tolist() for number in range(2)]


def test_ranks_write_and_read_the_same_store(tmp_path: Path) -> None:
    for answer in run_ranks(2, save_and_load, tmp_path):
        assert answer == [[0.0] * 100, [1.0] * 100]


def test_the_command_takes_addresses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = stored()
    save(kept, 1)
    save(kept, 2)
    kept.close()
    assert checkpoint_command.main(["ls", FOLDER]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["step-1", "step-2"]
    assert checkpoint_command.main(["verify", FOLDER]) == 0
    assert checkpoint_command.main(["diff", f"{FOLDER}/step-1", f"{FOLDER}/step-1"]) == 0
    assert checkpoint_command.main(["diff", f"{FOLDER}/step-1", f"{FOLDER}/step-2"]) == 1
    assert checkpoint_command.main(["weights", f"{FOLDER}/step-2", str(tmp_path / "w.safetensors")]) == 0
    assert torch.equal(load_file(tmp_path / "w.safetensors")["a"], weights(2)["model.a"])
    with pytest.raises(ConfigError, match="is not a local file"):
        checkpoint_command.main(["weights", f"{FOLDER}/step-2", f"{FOLDER}/w.safetensors"])
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        checkpoint_command.main(["ls", "memory://nothing/here"])
    (name,) = [name for name in names() if name.startswith("step-2/rank")]
    (place(FOLDER) / name).put(b"cut", new=False)
    with pytest.raises(CheckpointError, match="has 3 bytes instead of"):
        checkpoint_command.main(["verify", f"{FOLDER}/step-2"])


def test_what_is_missing_for_a_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r'checkpoint\.folder="nosuch://a/b" names a store that fsspec does not know'):
        checkpoints(Path("unused"), folder="nosuch://a/b")

    def not_there(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", not_there)
    with pytest.raises(ConfigError, match=rf'needs s3 \(Install s3fs.*pip install "shardtrain\[{objects.EXTRA}\]"'):
        checkpoints(Path("unused"), folder="s3://bucket/run")


@pytest.mark.parametrize(
    ("folder", "rule"),
    [
        ("file:///data/run", "write the path without the scheme"),
        ("s3://", "is not an address of a store"),
        ("simplecache::s3://bucket/run", "is not an address of a store"),
        ("s3://key:secret@bucket/run", "contains a credential"),
        ("s3://bucket/run", ""),
        ("checkpoint", ""),
    ],
)
def test_an_address_that_would_break_a_promise_is_refused(folder: str, rule: str) -> None:
    options = dataclasses.replace(Config().checkpoint, enable=True, folder=folder)
    told = [str(problem) for problem in check(Loaded(dataclasses.replace(Config(), checkpoint=options)))]
    assert len(told) == bool(rule) and all(rule in line and "secret" not in line for line in told)
