"""Limits of memory, threads and files: low limits are reported at start, and out of memory always has the same exit."""

from __future__ import annotations

import errno
import json
import os
import resource
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import forked
import patience
import pytest
from tiers import cases
from tiny_tokenizers import bpe_folder

from shardtrain.config.schema import DataLoaderOptions
from shardtrain.data import workers
from shardtrain.data.tokenizers import json_file
from shardtrain.launch import failure
from shardtrain.train.preflight import machine
from shardtrain.utils import bounded_reads, libraries, limits
from shardtrain.utils.errors import ConfigError, DataError, OutOfMemoryError

MIB = 2**20
ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."


def set_limits(monkeypatch: pytest.MonkeyPatch, cgroup: int = 0, **values: int) -> None:
    """Pretend that this process is not root and has only these limits."""
    known = {getattr(resource, f"RLIMIT_{name}"): value for name, value in values.items()}
    monkeypatch.setattr(
        resource, "getrlimit", lambda number: (known.get(number, resource.RLIM_INFINITY), 0)
    )
    monkeypatch.setattr(limits, "is_host_root", lambda: False)
    monkeypatch.setattr(limits, "cgroup_memory", lambda: (cgroup, cgroup // 2))
    monkeypatch.setattr(limits, "cgroup_threads", lambda: 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the needs are those of Linux")
@pytest.mark.parametrize(
    ("limited", "message"),
    [
        ({"AS": 300 * MIB}, "ulimit -v=300.00 MiB must be at least 1.50 GiB"),
        ({"DATA": 346_000 * 1024}, "ulimit -d=337.89 MiB must be at least 560.00 MiB"),
        ({"NPROC": 8}, "ulimit -u=8 must be at least 24"),
        ({"NOFILE": 40}, "ulimit -n=40 must be at least 96"),
        ({"cgroup": 512 * MIB}, "memory of the cgroup=512.00 MiB must be at least 640.00 MiB"),
    ],
)
def test_limit_that_is_too_small_is_named_with_the_required_value(
    limited: dict[str, int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_limits(monkeypatch, **limited)
    with pytest.raises(OutOfMemoryError) as caught:
        limits.require(2)

    (line,) = caught.value.problems
    assert str(line).startswith(f"{message} for 2 ranks on this host"), line

    # Without the limit, the run may start.
    set_limits(monkeypatch)
    limits.require(2)


@pytest.mark.skipif(sys.platform != "linux", reason="the needs are those of Linux")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    cases(
        [("RLIMIT_DATA", 346_000 * 1024, "ulimit -d="), ("RLIMIT_NOFILE", 16, "ulimit -n=")],
        nightly=[
            ("RLIMIT_DATA", 300 * MIB, "ulimit -d="),
            ("RLIMIT_AS", 2**30, "ulimit -v="),
            ("RLIMIT_AS", 1331 * MIB, "ulimit -v="),
            ("RLIMIT_NOFILE", 64, "ulimit -n="),
        ],
    ),
)
def test_run_with_a_small_limit_exits_with_7_and_one_line(
    name: str, value: int, message: str, tmp_path: Path
) -> None:
    number = getattr(resource, name)
    command = [
        sys.executable,
        "-m",
        "shardtrain",
        "train",
        "debug",
        "--nproc=2",
        f"--job.dump_folder={tmp_path}",
    ]
    done = forked.run(
        command, capture_output=True, text=True, timeout=patience.seconds(120),
        preexec_fn=lambda: resource.setrlimit(number, (value, value)),
    )  # fmt: skip
    (line,) = done.stderr.splitlines()

    assert done.returncode == 7, done.stderr
    assert line.startswith(f"error[7]: {message}"), done.stderr
    assert json.loads((tmp_path / "exit.json").read_text())["code"] == 7


@pytest.mark.skipif(sys.platform != "linux", reason="the needs are those of Linux")
@pytest.mark.parametrize(("library", "num_bytes"), [("numpy", 30_000_000), ("torch", 100_000_000)])
def test_import_that_would_end_the_process_is_refused(library: str, num_bytes: int) -> None:
    """Without enough memory, PyTorch would call ``abort``, and OpenBLAS ``exit``."""
    program = (
        "import resource, sys; from shardtrain.utils import limits;"
        f"resource.setrlimit(resource.RLIMIT_DATA, ({num_bytes}, {num_bytes}));"
        f"limits.ImportCheck().find_spec({library!r}, None)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"must be at least {limits._IMPORT_DATA_BYTES[library] // MIB}.00 MiB" in done.stderr
    assert f"to import {library}; raise it with ulimit -d" in done.stderr


@pytest.mark.nightly(
    "complete runs",
    by="tests/utils/test_limits.py::test_run_with_a_small_limit_exits_with_7_and_one_line",
)
@pytest.mark.skipif(sys.platform != "linux", reason="the needs are those of Linux")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RLIMIT_AS", 2**31), ("RLIMIT_DATA", 2**30), ("RLIMIT_DATA", 1331 * MIB), ("RLIMIT_DATA", 2**31),
        ("RLIMIT_NOFILE", 96),
    ],
)  # fmt: skip
def test_smallest_run_fits_above_the_needs(name: str, value: int, tmp_path: Path) -> None:
    number = getattr(resource, name)
    command = [*small_run(2, tmp_path), "--metrics.sample_prompt="]
    done = forked.run(
        command, capture_output=True, text=True, timeout=patience.seconds(120),
        preexec_fn=lambda: resource.setrlimit(number, (value, value)),
    )  # fmt: skip

    assert done.returncode == 0, done.stderr


def small_run(ranks: int, folder: Path) -> list[str]:
    """Return the command of a run of two steps."""
    return [
        sys.executable, "-m", "shardtrain", "train", "debug", f"--nproc={ranks}", f"--job.dump_folder={folder}",
        "--training.steps=2", "--training.seq_len=32", "--training.local_batch_size=1",
        "--model.overrides.num_layers=1",
    ]  # fmt: skip


def user_of_this_test() -> int:
    """Return the number of a user without processes, or that of the current user unless it is root."""
    return os.getuid() or 50_000 + os.getpid() % 10_000


def prefix_of_user(user: int) -> list[str]:
    """Return the start of a command that runs as another user. It may still read the files of root."""
    if os.getuid() != 0:
        return []
    return [
        "setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--inh-caps=+dac_read_search",
        "--ambient-caps=+dac_read_search", "--",
    ]  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="the needs are those of Linux")
@pytest.mark.skipif(
    os.getuid() == 0 and not shutil.which("setpriv"), reason="needs setpriv (util-linux)"
)
@pytest.mark.parametrize("most", cases([8], nightly=[3, 20, 60]))
def test_user_with_few_processes_is_refused_in_one_line(most: int, tmp_path: Path) -> None:
    """The kernel does not limit root, so the run has another user."""
    tmp_path.chmod(0o777)
    for parent in tmp_path.parents[:2]:
        parent.chmod(parent.stat().st_mode | 0o055)
    user = user_of_this_test()
    environment = {**os.environ, "HOME": str(tmp_path), "USER": "tester", "OMP_NUM_THREADS": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "compiler")
    done = subprocess.run(
        [*prefix_of_user(user), *small_run(2, tmp_path / "run"), "--metrics.sample_prompt="],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=patience.seconds(120),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NPROC, (most, most)),
    )  # fmt: skip

    assert "Traceback" not in done.stderr, done.stderr
    assert "panicked" not in done.stderr, done.stderr

    if most == 60:
        assert done.returncode == 0, done.stderr
        return
    line = f"error[7]: ulimit -u={most} must be at least 24 for 2 ranks on this host, even with the smallest model; "
    assert done.stderr == f"{line}raise it with ulimit -u\n"

    end = json.loads((tmp_path / "run/exit.json").read_text())
    assert done.returncode == end["code"] == 7
    assert end["retryable"] is False


def as_limited_user(most: int, action: Callable[[], object]) -> str:
    """Run ``action`` in a fork as a user with few processes. Return its error and all output."""
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if pid == 0:
            try:
                os.dup2(output.fileno(), 2)
                sys.stderr = os.fdopen(2, "w", 1, closefd=False)
                resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
                if os.getuid() == 0:
                    user = user_of_this_test()
                    os.setgroups([])
                    os.setgid(user)
                    os.setuid(user)
                action()
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        output.seek(0)
        return output.read()


needs_root = pytest.mark.skipif(
    os.getuid() != 0, reason="another program of this user would count, too"
)


@needs_root
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
def test_threads_of_other_programs_of_the_user_count() -> None:
    def start() -> None:
        end = threading.Event()
        others = [threading.Thread(target=end.wait, daemon=True) for _ in range(15)]
        for other in others:
            other.start()
        assert limits.startable_threads(3) == 3
        limits.require(1)

    # The fork, 15 threads, and 14 more.
    message = as_limited_user(30, lambda: (limits.require(1), print("fits", file=sys.stderr)))

    assert message == "fits\n"
    assert as_limited_user(26, start) == (
        "OutOfMemoryError: ulimit -u=26 leaves 10 more threads, but 1 rank on this host must be able to start 11; "
        "end other programs of this user, lower OMP_NUM_THREADS, or raise it with ulimit -u\n"
    )


@needs_root
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
def test_tokenizer_without_enough_threads_is_refused_before_its_library_panics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = bpe_folder(tmp_path) / "tokenizer.json"
    content = file.read_bytes()
    monkeypatch.setenv("RAYON_NUM_THREADS", "40")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.setattr(json_file, "_threads_of_process", None)

    tokenizer = json_file.JsonTokenizer(file, content, "model.tokenizer_path", "tokenizer")
    message = as_limited_user(20, lambda: tokenizer.encode_batch(["a text", "another text"]))

    assert message == (
        "OutOfMemoryError: ulimit -u=20 leaves 19 more threads, but the threads of the tokenizer must be able to "
        "start 40; end other programs of this user, lower RAYON_NUM_THREADS, or raise it with ulimit -u\n"
    )


@needs_root
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
def test_data_workers_without_enough_processes_are_refused_without_a_trace() -> None:
    message = as_limited_user(
        10, lambda: next(workers.in_order(range(9), DataLoaderOptions(num_workers=4)))
    )
    assert message == (
        "OutOfMemoryError: ulimit -u=10 leaves 9 more threads, but 4 data workers must be able to start 12; "
        "end other programs of this user, lower training.dataloader.num_workers, or raise it with ulimit -u\n"
    )


def test_limit_of_threads_of_a_cgroup_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "kubepods/pod-1"
    job.mkdir(parents=True)
    monkeypatch.setattr(limits, "_lines", lambda _: ["0::/kubepods/pod-1"])

    assert limits.cgroup_threads(tmp_path) == 0

    (job / "pids.max").write_text("max\n")
    (job.parent / "pids.max").write_text("1000\n")
    assert limits.cgroup_threads(tmp_path) == 1000

    monkeypatch.undo()
    set_limits(monkeypatch)
    monkeypatch.setattr(limits, "cgroup_threads", lambda: 5)

    with pytest.raises(OutOfMemoryError, match=r"pids.max of the cgroup=5 must be at least 12"):
        limits.require(1)


PROGRAM_WITH_THREADS = """
import sys, threading
threading.stack_size(65536)
end = threading.Event()
for _ in range(200):
    threading.Thread(target=end.wait).start()
print(flush=True)
sys.stdin.read()
end.set()
"""
REFUSALS = [
    MemoryError(),
    MemoryError("Unable to allocate 2.54 KiB for an array with shape (651,) and data type int32"),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),  # from os.fork
    RuntimeError(ALLOCATOR),
    RuntimeError("can't start new thread"),
    RuntimeError("could not create a primitive"),
    RuntimeError("std::bad_alloc"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
]


@pytest.mark.parametrize(
    "error", REFUSALS, ids=lambda error: f"{type(error).__name__} {error}"[:40]
)
def test_every_out_of_memory_error_has_the_same_code_and_names_the_limit(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_thread = "thread" in str(error) or isinstance(error, BlockingIOError)
    limit = limits.Limit("ulimit -d", 400 * MIB, 390 * MIB, 0, "raise it with ulimit -d")
    few = limits.Limit("ulimit -u", 50, 0, 0, "raise it with ulimit -u", is_count=True)
    roomy = limits.Limit("ulimit -v", 2**40, 2**30, 0, "raise it with ulimit -v")
    monkeypatch.setattr(limits, "read", lambda: [roomy, limit, few])
    monkeypatch.setattr(limits, "threads_in_use", lambda name: 49)
    message = failure.describe(error, 0)

    assert message.exit_code == 7

    start = "no more processes or threads can be started" if is_thread else "memory ran out"
    assert message.message.startswith(start)
    end = (
        "under ulimit -u=50, of which 49 are in use; end other programs, or raise it with ulimit -u"
        if is_thread
        else "ulimit -d; 390.00 MiB of it are used"
    )

    assert message.message.endswith(end), message.message

    # without a limit, the message describes the machine's memory
    monkeypatch.setattr(limits, "read", list)
    monkeypatch.setattr(limits, "host_memory", lambda: {"total": 2**30, "available": 2**20})
    assert failure.describe(error, 0).message.endswith(
        "this machine; 1.00 MiB of 1.00 GiB are free now"
    )

    with pytest.raises(OutOfMemoryError), limits.memory_errors():
        raise error


def test_threads_in_use_are_those_of_all_programs_of_the_user() -> None:
    before = limits.threads_in_use(limits.OF_THREADS)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM_WITH_THREADS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        in_use = limits.threads_in_use(limits.OF_THREADS)
        other.stdin.close()

    # Other programs of the user may end or start during the test.
    assert in_use >= 200
    assert before >= 1


def test_other_errors_are_not_about_memory() -> None:
    for error in (
        RuntimeError("shapes differ"),
        DataError("row 3: out of memory"),
        OSError(errno.EIO, "I/O error"),
    ):
        assert not limits.is_out_of_memory(error)
        with pytest.raises(type(error)), limits.memory_errors():
            raise error
    message = failure.describe(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."), 0)

    assert (message.exit_code, message.message) == (
        7,
        "CUDA out of memory. Tried to allocate 2.00 GiB.",
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the needs are those of Linux")
def test_memory_of_a_machine_respects_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "host_memory", lambda: {"total": 2**35, "swap": 2**30})
    set_limits(monkeypatch)
    assert machine._host(2) == ("this machine", 2**35 + 2**30)

    set_limits(monkeypatch, cgroup=2**33)
    assert machine._host(2) == ("this container", 2**33 + 2**30)
    # three quarters of 560 MiB are not available to a model
    set_limits(monkeypatch, DATA=1000 * MIB)
    assert machine._host(2) == ("ulimit -d of 2 ranks", 2 * 580 * MIB)


def test_cgroup_of_a_job_applies_without_a_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = tmp_path / "system.slice" / "job_7" / "step_0"
    job.mkdir(parents=True)
    monkeypatch.setattr(
        limits, "_lines", lambda _: ["1:name=systemd:/", "0::/system.slice/job_7/step_0"]
    )

    assert limits.cgroup_memory(tmp_path) == (0, 0)

    for folder, limit in ((job, "max"), (job.parent, "1000"), (tmp_path / "system.slice", "5000")):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text("600\n")
    assert limits.cgroup_memory(tmp_path) == (1000, 600)

    # Version 1 has a hierarchy for memory.
    monkeypatch.setattr(
        limits, "_lines", lambda _: ["5:cpu:/slurm/job_8", "4:memory:/slurm/job_7", "0::/"]
    )
    job = tmp_path / "memory" / "slurm" / "job_7"
    job.mkdir(parents=True)
    (job / "memory.limit_in_bytes").write_text("900\n")
    (job / "memory.usage_in_bytes").write_text("500\n")

    assert limits.cgroup_memory(tmp_path) == (900, 500)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """Create a memory cgroup below that of this process (version 1), or below the root (version 2)."""
    root = Path("/sys/fs/cgroup")
    parent = root
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        if ":memory:" in line:  # cgroup v1
            parent = root / "memory" / line.split(":", 2)[2].lstrip("/")
            break
    folder = parent / f"shardtrain-{secrets.token_hex(8)}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be created here: {error}")
    try:
        if not any((folder / name).exists() for name in LIMIT_FILES):
            pytest.skip("this machine has no memory controller for new cgroups")
        yield folder
    finally:
        # All processes of a test have ended. The kernel may still hold the last one.
        patience.wait_for(lambda: not (folder / "cgroup.procs").read_text(), 20)
        folder.rmdir()


LIMIT_FILES = ("memory.max", "memory.limit_in_bytes")

GREEDY = """
import os

def factor(step, total_steps, warmup_steps, min_lr_factor):
    if os.environ.get("RANK") == "1":
        factor.kept = bytearray(os.urandom(2**20) * 4096)
    return 1.0
"""


@pytest.mark.skipif(sys.platform != "linux", reason="cgroups are Linux's")
@pytest.mark.parametrize(
    ("limit", "code", "message"),
    cases(
        [(400 * MIB, 7, "memory of the cgroup=400.00 MiB must be at least 640.00 MiB for 2 ranks")],
        nightly=[(1200 * MIB, 6, "was killed by signal 9 (the kernel sends it when memory runs out), under memory of "
                  "the cgroup=1.17 GiB")],
    ),
)  # fmt: skip
def test_a_real_cgroup_is_read_and_named_when_the_kernel_kills(
    cgroup: Path, limit: int, code: int, message: str, tmp_path: Path
) -> None:
    (limit_file,) = [cgroup / name for name in LIMIT_FILES if (cgroup / name).exists()]
    limit_file.write_text(str(limit))
    (tmp_path / "greedy.py").write_text(GREEDY)
    command = [sys.executable, "-m", "shardtrain", "train", "debug", "--nproc=2", f"--job.dump_folder={tmp_path}/run",
               f"--lr_scheduler.name={tmp_path}/greedy.py", "--training.steps=5"]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patience.seconds(120),
        preexec_fn=lambda: (cgroup / "cgroup.procs").write_text("0"),
    )  # fmt: skip
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error[")]

    assert done.returncode == code, done.stderr
    assert message in line, done.stderr

    # Only the kernel's kill may be tried again.
    end = json.loads((tmp_path / "run" / "exit.json").read_text())
    assert (end["code"], end["retryable"]) == (code, code == 6)
    assert message in end["message"]


def test_reading_a_small_file_needs_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer_config.json"
    path.write_text("{}")
    tracemalloc.start()
    try:
        assert bounded_reads.start(path, 64 * MIB) == b"{}"
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        (
            None,
            ConfigError,
            "needs the planted_library library, which is not installed; pip install it",
        ),
        (
            "import planted_part",
            ConfigError,
            "is installed but cannot be imported (ModuleNotFoundError: No module",
        ),
        (
            "raise ImportError('lib.so: undefined symbol')",
            ConfigError,
            "(ImportError: lib.so: undefined symbol)",
        ),
        (
            "raise RuntimeError('no driver')",
            ConfigError,
            "but cannot be imported (RuntimeError: no driver)",
        ),
        ("raise MemoryError", OutOfMemoryError, "memory ran out"),
        (
            "raise ImportError('lib.so: failed to map segment from shared object')",
            OutOfMemoryError,
            "map segment",
        ),
    ],
)
def test_missing_library_is_distinguished_from_a_broken_one(
    source: str | None,
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if source is not None:
        (tmp_path / "planted_library.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    with pytest.raises(kind) as caught:
        libraries.load("planted_library", "data.option", "value", "it")
    assert message in str(caught.value), caught.value


@pytest.mark.parametrize(("user", "mapping", "is_root"), [
    (0, "         0          0 4294967295", True), (1000, "         0          0 4294967295", False),
    (0, "0 100000 65536", False), (0, "0 1000 1\n1 100000 65536", False), (1000, "1000 0 1", True), (0, "", True),
])  # fmt: skip
def test_root_of_a_rootless_container_has_a_limit_of_threads(
    user: int, mapping: str, is_root: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux exempts the user who is root outside of all containers."""
    monkeypatch.setattr(limits, "_lines", lambda path: mapping.splitlines())
    monkeypatch.setattr(limits.os, "getuid", lambda: user)
    assert limits.is_host_root() == is_root
