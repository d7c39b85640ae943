"""Checkpoints in an object store are complete or absent, whichever call fails and whenever a run is killed."""

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

from shardtrain.checkpoint import async_save, lease, objects
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.manifest import TensorFile
from shardtrain.checkpoint.objects import ObjectPath
from shardtrain.checkpoint.storage import place
from shardtrain.config import Loaded
from shardtrain.config.rules import check
from shardtrain.config.schema import Checkpoint, Config
from shardtrain.launch import signals
from shardtrain.tools import checkpoint_command
from shardtrain.tools.generate import locate_checkpoint
from shardtrain.utils.errors import CheckpointError, ConfigError, StorageError

FOLDER = "memory://bucket/run"


@pytest.fixture(autouse=True)
def group(request: pytest.FixtureRequest) -> Iterator[None]:
    """Empty the store, and create a process group of one rank unless the test forks ranks.

    After the test, stop the threads that renew leases.
    """
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


def die(manager: Checkpoints) -> None:
    """Imitate the death of a process: its lease is neither renewed nor released."""
    manager._lease._ended.set()  # type: ignore[union-attr]
    atexit.unregister(manager._lease.release)


def names() -> list[str]:
    return sorted(name.removeprefix("/bucket/run/") for name in MemoryFileSystem.store)


def assert_step_is_intact(step: int) -> None:
    """Load a step with all checks, and compare every element with its expected value."""
    loaded = weights(-1)
    loaded_optimizer = rest(-1)
    facts_loaded = stored(load_only=True).load(
        place(f"{FOLDER}/step-{step}"), loaded, loaded_optimizer
    )
    assert facts_loaded["state"] == {"step": step}
    for tensors, expected in ((loaded, weights(step)), (loaded_optimizer, rest(step))):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_commands_find_the_checkpoints_of_a_run_by_its_folder(tmp_path: Path) -> None:
    """The configuration in the run's folder contains the address of the checkpoints."""
    save(stored(), 5)
    config = Config(checkpoint=Checkpoint(folder=FOLDER))
    chosen = locate_checkpoint.find_checkpoint(tmp_path, config)

    assert str(chosen.path) == f"{FOLDER}/step-5"
    assert isinstance(chosen.path, ObjectPath)

    empty = Config(checkpoint=Checkpoint(folder="memory://bucket/empty"))
    with pytest.raises(
        CheckpointError, match="neither it nor memory://bucket/empty has a folder step-N"
    ):
        locate_checkpoint.find_checkpoint(tmp_path, empty)


def test_saved_checkpoints_are_listed_and_loaded() -> None:
    manager = stored(keep_latest_k=2)
    assert manager.to_continue() is None

    for step in (5, 10, 100):
        save(manager, step)
    assert manager.steps() == [10, 100]
    assert str(manager.to_continue()) == f"{FOLDER}/step-100"
    assert str(signals.newest_checkpoint(place(FOLDER))) == f"{FOLDER}/step-100"
    assert_step_is_intact(10)
    assert_step_is_intact(100)

    # After the end, neither the lease nor a draft is left in the store.
    manager.close()
    assert [name.partition("/")[2].partition("-")[0] for name in names()] == [
        "manifest.json",
        "rank",
    ] * 2
    assert not Path("unused").exists()


def test_saving_a_step_again_replaces_its_objects() -> None:
    manager = stored()
    save(manager, 3)
    old = names()
    manager.save(3, weights(8), rest(8), facts(8), last=False)
    loaded = weights(-1)
    stored(load_only=True).load(place(f"{FOLDER}/step-3"), loaded, {})

    assert torch.equal(loaded["model.b"], torch.tensor(8.0))
    assert len(names()) == len(old)
    assert names() != old


def test_steps_saved_again_count_for_retention() -> None:
    """A rewritten manifest may have the size of the old one, but lists other files."""
    manager = stored(keep_latest_k=2)
    for step in (11, 12, 13, 12, 13, 14):
        save(manager, step)
    assert manager.steps() == [13, 14]


@pytest.mark.parametrize(
    ("folder", "requests"), [("run", 1), ("run[1]", 0), ("run*", 0), ("r?n", 0)]
)
def test_deletion_takes_one_request_and_expands_no_wildcards(folder, requests, monkeypatch) -> None:
    other_addresses = [f"memory://bucket/run1/step-3/rank-{rank}.bin" for rank in range(3)]
    own_addresses = [f"memory://bucket/{folder}/step-3/rank-{rank}.bin" for rank in range(3)]
    store = MemoryFileSystem()
    # If the store expanded `run[1]` or `run*` as globs, they would match the other run's folder `run1`.
    for address in (*other_addresses, *own_addresses):
        store.pipe_file(address, b"bytes")
    deleted_keys: list[Any] = []
    remove = MemoryFileSystem.rm

    def recorded_remove(store: MemoryFileSystem, keys: Any) -> None:
        deleted_keys.append(keys)
        remove(store, keys)

    monkeypatch.setattr(MemoryFileSystem, "rm", recorded_remove)
    objects.unlink_all([ObjectPath(store, address) for address in own_addresses])

    assert len(deleted_keys) == requests
    assert names() == [name.removeprefix("memory:/") for name in other_addresses]

    objects.unlink_all([])


def test_store_without_bulk_deletion_deletes_one_object_at_a_time(monkeypatch) -> None:
    def refuse(*_: Any) -> None:
        raise NotImplementedError("DeleteObjects")

    store = MemoryFileSystem()
    paths = [ObjectPath(store, f"{FOLDER}/rank-{rank}.bin") for rank in range(3)]
    for path in paths:
        store.pipe_file(path.address, b"bytes")
    monkeypatch.setattr(MemoryFileSystem, "rm", refuse)
    objects.unlink_all(paths)

    assert not names()


def test_checkpoint_without_a_manifest_is_ignored_and_swept() -> None:
    manager = stored()
    save(manager, 3)
    manager.close()
    MemoryFileSystem.store.pop("/bucket/run/step-3/manifest.json")
    (place(FOLDER) / "step-3" / "notes.txt").put(b"of the user", new=True)
    # the marker of a background save that was killed
    draft = dataclasses.replace(place(FOLDER) / "step-3", suffix="-0af3-1")
    async_save.write_marker(draft, 1, "0123abcd", TensorFile("rank-00001-0af3-1.bin", 8, "ab" * 32))

    with pytest.raises(CheckpointError, match="has no such step, nor any other"):
        stored(load_step=3, load_only=True).to_continue()

    again = stored()
    assert again.to_continue() is None

    again.close()
    assert names() == ["step-3/notes.txt"]


def test_damaged_checkpoint_is_skipped() -> None:
    manager = stored()
    for step in (2, 4):
        save(manager, step)
    (name,) = [name for name in names() if name.startswith("step-4/rank")]
    intact = (place(FOLDER) / name).read_bytes()
    for damaged in (intact[:-1], intact + b"0", bytes([intact[0] ^ 1]) + intact[1:]):
        (place(FOLDER) / name).put(damaged, new=False)
        assert str(manager.to_continue()) == f"{FOLDER}/step-2"

    with pytest.raises(CheckpointError, match="rank-00000-"):
        stored(load_step=4, load_only=True).to_continue()


# -- one writer --------------------------------------------------------------------------------------------------------


def as_other_host(**fields: Any) -> None:
    path = place(FOLDER) / lease.LEASE
    path.put(
        json.dumps({**json.loads(path.read_bytes()), "nonce": "ab", **fields}).encode(), new=False
    )


def test_active_lease_is_respected_and_a_lost_one_stops_its_writer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = stored()
    first.to_continue()
    save(first, 1)
    as_other_host(pid=1, process_start=lease._process_start(1))

    with pytest.raises(
        ConfigError, match=r"checkpoint\.folder: memory://bucket/run is being written by process 1"
    ):
        stored().to_continue()
    with pytest.raises(ConfigError, match="was taken over by"):
        save(first, 2)
    assert first.steps() == [1]


def test_store_without_conditional_writes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    memory = fsspec.filesystem("memory")

    class Plain:
        """Store without conditional writes."""

        def __getattr__(self, name: str) -> Any:
            return getattr(memory, name)

        def pipe_file(self, path: str, value: bytes, mode: str = "overwrite") -> None:
            if mode != "overwrite":
                raise ValueError(mode)
            memory.pipe_file(path, value)

    with caplog.at_level("INFO"):
        stored().to_continue()
        # The in-memory store supports conditional writes, so its start logs nothing.
        assert "cannot reject" not in caplog.text
        memory.rm(f"{FOLDER}/{lease.LEASE}")
        stored_through(Plain()).to_continue()

    assert caplog.text.count("this store cannot reject a second writer") == 1


def test_lease_of_another_host_is_taken_over_when_it_is_not_renewed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    beats = itertools.count(1)
    read_bytes = ObjectPath.read_bytes

    def beating(path: ObjectPath) -> bytes:
        """Each read of the lease finds a new heartbeat, as if its holder were alive."""
        content = read_bytes(path)
        if path.name != lease.LEASE:
            return content
        fields = {**json.loads(content), "beats": next(beats)}
        return json.dumps(fields).encode()

    monkeypatch.setattr(ObjectPath, "read_bytes", beating)
    with pytest.raises(ConfigError, match="is being written by .* on elsewhere"):
        stored().to_continue()


# -- faults ------------------------------------------------------------------------------------------------------------

CALLS = ("ls", "info", "cat_file", "pipe_file", "rm_file", "open", "write", "close")


class Killed(BaseException):
    """Simulated kill of the process. All later calls of the store fail too."""


class FaultyStore:
    """In-memory store whose n-th call fails, before or (``late``) after it takes effect."""

    def __init__(
        self, number: int, failure: Callable[[], BaseException], late: bool = False
    ) -> None:
        self.memory = fsspec.filesystem("memory")
        self.number, self.failure, self.late, self.calls = number, failure, late, 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.memory, name)
        return self.watched(method) if name in CALLS else method

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            fails = self.calls == self.number or (
                self.calls > self.number and self.failure is Killed
            )
            if fails and not self.late:
                raise self.failure()
            answer = call(*arguments, **options)
            if fails:
                raise self.failure()
            return FaultyFile(self, answer) if hasattr(answer, "commit") else answer

        return watch


class FaultyFile:
    """File of a faulty store. Its bytes appear in the store on close, as with multipart uploads."""

    def __init__(self, store: FaultyStore, file: Any) -> None:
        self.data, self.key = bytearray(), file.path
        self.write, self.close = store.watched(self.data.extend), store.watched(self.commit)
        store.memory.store.pop(self.key, None)

    def commit(self) -> None:
        fsspec.filesystem("memory").pipe_file(self.key, bytes(self.data))


def stored_through(store: Any, **options: Any) -> Checkpoints:
    """Return Checkpoints of one process whose calls all go through ``store``."""
    manager = stored(**options)
    manager._storage.folder = ObjectPath(store, FOLDER)
    manager._folder = ObjectPath(store, FOLDER)
    manager._lease._object = manager._lease._path = ObjectPath(store, f"{FOLDER}/{lease.LEASE}")
    return manager


def failures() -> list[Callable[[], BaseException]]:
    return [
        lambda: OSError("the service is not available"),  # without errno, like s3fs
        lambda: PermissionError("Access Denied"),
        lambda: RuntimeError("HttpError 503"),  # not an OSError, like gcsfs
    ]


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_failed_call_is_never_a_success_and_keeps_earlier_checkpoints(late: bool) -> None:
    """Fail each call of a save once. In the case ``after``, the store executes it but the answer is lost."""
    step = 2
    failed_saves = 0
    with_deletes = stored(keep_latest_k=2)
    for first in (1, 2):
        save(with_deletes, first)
    with_deletes.close()

    # Count the calls of a save that also deletes a checkpoint.
    counter = FaultyStore(10**9, Killed)
    manager = stored_through(counter, keep_latest_k=2)
    manager.to_continue()
    first_call = counter.calls
    save(manager, 3)
    manager.close()

    # Fail each of these calls, in each way.
    for number, failure in itertools.product(range(first_call + 1, counter.calls + 1), failures()):
        step += 1
        store = FaultyStore(10**9, failure, late)
        manager = stored_through(store, keep_latest_k=2)
        manager.to_continue()
        steps_before = manager.steps()
        store.number = number
        store.calls = first_call
        message = ""
        try:
            save(manager, step)
        except (StorageError, CheckpointError) as error:
            message = str(error)
        store.number = -1

        newest = stored().steps()[-1]
        assert newest == step or (message and newest == steps_before[-1]), (number, message)
        assert_step_is_intact(newest)
        if message:
            failed_saves += 1
            assert FOLDER in message and "\n" not in message and "errno" in message, message
        manager.close()

    assert failed_saves > 10


def test_kill_at_any_call_keeps_the_newest_saved_checkpoint() -> None:
    newest = 0
    # kill in the first 30 calls (mostly listing and sweeping), then in each call of three saves
    for number in (*range(1, 30), *range(101, 300)):
        store = FaultyStore(number, Killed)
        manager = stored_through(store, keep_latest_k=2)
        saved_step = newest
        try:
            manager.to_continue()
            store.calls = max(store.calls, 100)
            for step in range(newest + 1, newest + 4):
                save(manager, step)
                saved_step = step
        except Killed:
            pass
        # Three saves end with fewer calls than ``number``, so each of their calls has failed once.
        if store.calls < number:
            manager.close()
            break
        die(manager)
        newest_checkpoint = stored(load_only=True).to_continue()
        newest = int(newest_checkpoint.name[5:]) if newest_checkpoint else 0
        assert newest in (saved_step, saved_step + 1)
        for step in stored().steps():
            assert_step_is_intact(step)

    assert newest > 20
    assert 150 < number < 299

    last = stored()
    last.to_continue()
    last.close()

    assert all(
        name.startswith(tuple(f"step-{step}/" for step in last.steps())) for name in names()
    ), "leftovers are swept"


# -- more than one rank, and the command -------------------------------------------------------------------------------


def save_and_load(rank: int, root: Path) -> list[list[float]]:
    """Save and load in a store that two processes share: fsspec's view of a local folder."""
    import torch.distributed as dist

    manager = Checkpoints(
        Config(checkpoint=Checkpoint(enable=True, folder=f"local://{root}/bucket"))
    )
    (root / "bucket/step-4").mkdir(parents=True, exist_ok=True)
    own_tensors = {f"model.{rank}": torch.full((100,), float(rank))}
    manager.save(4, own_tensors, {}, {"state": {"step": 4}}, last=False)
    newest = manager.to_continue()
    other_tensors = {f"model.{1 - rank}": torch.zeros(100)}
    loaded = {**{name: torch.zeros(100) for name in own_tensors}, **other_tensors}
    assert newest is not None
    manager.load(newest, loaded, {})
    dist.barrier()
    manager.close()
    return [loaded[f"model.{number}"].tolist() for number in range(2)]


def test_ranks_share_a_store(tmp_path: Path) -> None:
    for answer in run_ranks(2, save_and_load, tmp_path):
        assert answer == [[0.0] * 100, [1.0] * 100]


def test_command_accepts_addresses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manager = stored()
    save(manager, 1)
    save(manager, 2)
    manager.close()

    assert checkpoint_command.main(["ls", FOLDER]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step-1", "step-2"]

    step_1, step_2 = f"{FOLDER}/step-1", f"{FOLDER}/step-2"
    assert checkpoint_command.main(["verify", FOLDER]) == 0
    assert checkpoint_command.main(["diff", step_1, step_1]) == 0
    assert checkpoint_command.main(["diff", step_1, step_2]) == 1

    output = tmp_path / "w.safetensors"
    assert checkpoint_command.main(["weights", step_2, str(output)]) == 0
    assert torch.equal(load_file(output)["a"], weights(2)["model.a"])
    with pytest.raises(ConfigError, match="is not a local file"):
        checkpoint_command.main(["weights", step_2, f"{FOLDER}/w.safetensors"])
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        checkpoint_command.main(["ls", "memory://nothing/here"])

    # A truncated file of step 2 makes its verification fail.
    (name,) = [name for name in names() if name.startswith("step-2/rank")]
    (place(FOLDER) / name).put(b"cut", new=False)
    with pytest.raises(CheckpointError, match="has 3 bytes instead of"):
        checkpoint_command.main(["verify", step_2])


def test_missing_dependency_of_a_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError,
        match=r'checkpoint\.folder="nosuch://a/b" names a store that fsspec does not know',
    ):
        checkpoints(Path("unused"), folder="nosuch://a/b")

    def not_there(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "url_to_fs", not_there)
    with pytest.raises(
        ConfigError, match=rf'needs s3 \(Install s3fs.*pip install "shardtrain\[{objects.EXTRA}\]"'
    ):
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
def test_unsafe_address_is_rejected(folder: str, rule: str) -> None:
    options = dataclasses.replace(Config().checkpoint, enable=True, folder=folder)
    problems = [
        str(problem) for problem in check(Loaded(dataclasses.replace(Config(), checkpoint=options)))
    ]

    assert len(problems) == bool(rule)
    assert all(rule in line and "secret" not in line for line in problems)


class CountingStore:
    """A store that counts its requests."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)
        if name in ("ls", "rm", "rm_file", "pipe_file", "cat_file", "info"):
            self.requests += 1
        return method


@pytest.mark.parametrize("ranks", [2, 200])
def test_requests_for_the_markers_of_a_background_save_do_not_grow_with_ranks(ranks: int) -> None:
    store = CountingStore(MemoryFileSystem())
    folder = ObjectPath(store, "memory://markers/step-1", suffix="-0af3-1")
    written = [
        TensorFile(f"rank-{rank:05d}-0af3-1.bin", 8 * rank, "ab" * 32) for rank in range(ranks)
    ]
    for rank in range(1, ranks):
        async_save.write_marker(folder, rank, "0123abcd", written[rank])
    async_save.write_marker(folder, 1, "earlier", written[0])
    store.requests = 0

    markers = async_save.wait_for_markers(folder, range(1, ranks), "0123abcd", lambda: None)
    assert markers == written[1:]
    assert store.requests <= 3

    # Only the markers of this save are deleted. The marker of an earlier save remains.
    (remaining,) = [path.name for path in folder.list_below()]
    assert "_earlier_" in remaining
    assert remaining.endswith("-0af3-1.done")
