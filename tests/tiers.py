"""Pytest plugin that selects tests: a default tier that covers every law, and nightly cases in shares.

A law is a test function, and its cases are its parameters. Cases marked ``nightly`` test the same law at more sizes,
meshes or seeds. ``pytest`` runs the default tier, ``--all`` runs everything, ``--share 2/5`` runs the second fifth of
the nightly cases, and ``--laws`` lists every law with its cases. A test named on the command line
(``tests/test_grid.py::test_name``) runs with all its cases.

The checksum of its name assigns a case to a share, so adding or removing other cases does not move it.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import patience
import pytest
import pytest_timeout
import workers
from _pytest.doctest import DoctestModule

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks would compete for cores
# Disable heartbeat lines, which slow commands print: tests compare the entire output of commands.
os.environ.setdefault("SHARDTRAIN_HEARTBEAT_SECONDS", "0")
# No folder can be created below os.devnull, so tests add nothing to the user's list of launched runs.
os.environ["XDG_STATE_HOME"] = os.devnull
# Without this, each garbage collection in a forked rank visits all objects that the tests imported and copies their
# pages: 28 % of the cost of a rank that runs two steps
os.register_at_fork(after_in_child=gc.freeze)


def _forget_compile_threads() -> None:
    """Drop PyTorch's pool of compile threads in a fork: exit would wait for its threads, which do not exist there."""
    compiling = sys.modules.get("torch._inductor.async_compile")
    if compiling is not None:
        compiling.AsyncCompile.pool.cache_clear()


os.register_at_fork(after_in_child=_forget_compile_threads)

SHARES = 5
"""Number of shares of the nightly cases, in ``--laws`` and .ci/run."""
COSTS = os.environ.get("SHARDTRAIN_TEST_COSTS")
"""File that receives one line of JSON per test: its name, wall-clock seconds, and CPU seconds including its ranks."""
FAILURES = os.environ.get("SHARDTRAIN_TEST_FAILURES")
"""File that receives each failed test with the end of its report. .ci/run prints it last."""
LONGEST_FIRST = (
    "test_slurm_refusals.py",
    "test_slurm_in_job.py",
    "test_ssh_machines.py",
    "test_grid.py",
    "test_pretended_accelerator.py",
    "test_requests_to_stop.py",
    "test_docs.py",
    "test_search.py",
    "test_same_numbers.py",
    "test_fake_backend.py",
    "test_slurm.py",
    "test_expert_parallel.py",
    "test_hangs.py",
    "test_ssh.py",
    # Files with an expensive shared fixture. Each worker that runs some of their tests creates it again.
    "test_resume.py",
    "test_hostile_artefacts.py",
    "test_exact_continuation.py",
    "test_nan_guard.py",
    "test_on_ranks.py",
    "test_model_faults.py",
    "test_others.py",
    "test_loss_spikes.py",
    "test_trainer.py",
    "test_data_end.py",
)
"""Files that wait long, compute a lot, or have an expensive shared fixture."""


def cases(default: Iterable[Any], nightly: Iterable[Any]) -> list[Any]:
    """Return values for ``pytest.mark.parametrize``, with the nightly ones marked. A tuple holds several parameters."""

    def marked(value: Any) -> Any:
        if isinstance(value, tuple) and hasattr(value, "marks"):
            return value._replace(marks=[*value.marks, pytest.mark.nightly])
        parameters = value if isinstance(value, tuple) else (value,)
        return pytest.param(*parameters, marks=pytest.mark.nightly)

    return [*default, *map(marked, nightly)]


def chosen(request: pytest.FixtureRequest, name: str) -> set[Any]:
    """Return the values of parameter ``name`` in the selected tests of this module, for a fixture to prepare."""
    return {
        item.callspec.params[name]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and name in getattr(getattr(item, "callspec", None), "params", {})
    }


def parse_share(text: str) -> tuple[int, int]:
    """Parse "2/5", the second of five shares, to (2, 5). Raise pytest.UsageError if it is invalid."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--share={text} must be K/N with 1 <= K <= N, such as 2/{SHARES}")
    return int(number), int(count)


def share_of(name: str, count: int = SHARES) -> int:
    """Return the share of a case, from 1 to ``count``."""
    return zlib.crc32(name.encode()) % count + 1


@dataclass
class Law:
    """A test function and the number of its cases.

    Attributes:
        file: Path of its file.
        name: Name of the function.
        default: Number of cases in the default tier.
        nightly: Number of nightly cases.
        chosen: Number of cases that run now.
        shares: Number of nightly cases per share of SHARES.
        reason: Why no case is in the default tier.
        by: A law in the default tier that covers the same behavior at lower cost.
    """

    file: str
    name: str
    default: int = 0
    nightly: int = 0
    chosen: int = 0
    shares: dict[int, int] = field(default_factory=dict)
    reason: str = ""
    by: str = ""


def law_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def is_chosen(item: pytest.Item, config: pytest.Config) -> bool:
    marker = item.get_closest_marker("nightly")
    if config.option.all_tiers or config.stash[NAMED]:
        return True
    if config.option.share is None:
        return marker is None
    number, count = parse_share(config.option.share)
    return marker is not None and share_of(item.nodeid, count) == number


PACKAGE = Path(__file__).parents[1] / "shardtrain"
COSTLY = Path(__file__).with_name("costly.txt")
"""List of cases to treat as nightly, because of their measured cost."""
NAMED = pytest.StashKey[bool]()
"""True if the command line names single tests."""
LAWS = pytest.StashKey[dict[str, Law]]()
_of_workers: dict[str, dict[str, Any]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "which tests run")
    group.addoption(
        "--all",
        action="store_true",
        dest="all_tiers",
        help="run the default tier and all nightly cases",
    )
    group.addoption(
        "--share", metavar="K/N", help="run only the K-th of N shares of the nightly cases"
    )
    group.addoption(
        "--minutes",
        type=float,
        metavar="N",
        help="skip tests that have not started after N minutes",
    )
    group.addoption(
        "--backwards",
        action="store_true",
        help="run files in reverse order, starting with those --minutes skipped",
    )
    group.addoption(
        "--laws", action="store_true", help="list every law with its cases, and run nothing"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if config.option.share:
        parse_share(config.option.share)
    if config.option.laws:  # a list needs no workers
        config.option.numprocesses = None
        config.option.dist = "no"
        config.option.tx = []
    config.stash[NAMED] = any("::" in argument for argument in config.args)


_STARTED = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that would start after the time limit of the run."""
    minutes = item.config.option.minutes
    if minutes is not None and time.monotonic() - _STARTED > 60 * minutes:
        pytest.skip(f"skipped: --minutes {minutes:g} are over")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Restore PyTorch's own kernels: a run in this process may have selected others, with other memory layouts."""
    kernels = sys.modules.get("shardtrain.ops.chosen_kernels")
    if kernels is not None:
        kernels.use(kernels.PYTORCH)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files of the package without doctests."""
    if collection_path.suffix == ".py" and collection_path.is_relative_to(PACKAGE):
        return True if b">>>" not in collection_path.read_bytes() else None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Iterator[None]:
    """Collect doctests only from the package.

    Collecting them from a test helper would import it again under another name. Its classes would then exist twice: one
    registered with a library, and another one that tests patch.
    """
    collectors: list[pytest.Collector] = yield
    if file_path.is_relative_to(PACKAGE):
        return collectors
    return [collector for collector in collectors if not isinstance(collector, DoctestModule)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable garbage collection during test collection, whose many objects all stay alive."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if was_enabled:
            gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -k and -m select from the items
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the tests to run, and order the slowest files first so no core is idle at the end."""
    config.stash.setdefault(NAMED, any("::" in argument for argument in config.args))
    laws: dict[str, Law] = {}
    selected = []
    deselected = []
    costly = {
        line for line in COSTLY.read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    }
    for item in items:
        if item.nodeid in costly:
            item.add_marker(pytest.mark.nightly("costly.txt: a cheaper case covers its law"))
        key = law_of(item)
        law = laws.setdefault(key, Law(*key.split("::", 1)))
        if marker := item.get_closest_marker("nightly"):
            share = share_of(item.nodeid)
            law.nightly += 1
            law.shares[share] = law.shares.get(share, 0) + 1
            law.reason = law.reason or " ".join(marker.args)
            law.by = law.by or marker.kwargs.get("by", "")
        else:
            law.default += 1
        if is_chosen(item, config):
            law.chosen += 1
            selected.append(item)
        else:
            deselected.append(item)
    workers_input = getattr(config, "workerinput", {"workercount": 1})
    items[:] = dealt(selected, workers_input["workercount"], config.option.backwards)
    config.stash[LAWS] = laws
    if deselected and not config.option.laws:
        config.hook.pytest_deselected(items=deselected)
    if hasattr(config, "workeroutput"):
        config.workeroutput["laws"] = {key: asdict(law) for key, law in laws.items()}


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collection, and collect less often than by default.

    The collected tests stay alive, and a run in this process calls the garbage collector. Tests leave little garbage,
    and collecting it at the default rate took 5 % of their CPU time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def dealt(items: list[pytest.Item], num_workers: int, backwards: bool = False) -> list[pytest.Item]:
    """Order tests such that each worker of ``--dist worksteal`` starts with its part of the longest files.

    Worksteal divides the list into one slice per worker, with equal numbers of tests. A worker without tests takes some
    from the end of another slice. With ``backwards``, the other files are in reverse order, so a run with a time limit
    skips different ones.
    """
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    long_files: dict[Path, list[pytest.Item]] = {}
    other_files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files = long_files if item.path.name in places else other_files
        files.setdefault(item.path, []).append(item)
    other_paths = reversed(other_files) if backwards else other_files
    other_items = [item for path in other_paths for item in other_files[path]]

    def load(slice_: list[pytest.Item]) -> tuple[int, int]:
        """Number of files, then number of tests."""
        return len({item.path for item in slice_}), len(slice_)

    slices: list[list[pytest.Item]] = [[] for _ in range(num_workers)]
    for path in sorted(long_files, key=lambda path: places[path.name]):
        min(slices, key=load).extend(long_files[path])
    order: list[pytest.Item] = []
    for number, slice_ in enumerate(slices):
        size = (len(items) - len(order)) // (num_workers - number)
        num_more = max(0, size - len(slice_))
        order += slice_ + other_items[:num_more]
        del other_items[:num_more]
    return order + other_items


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the xdist workers from one process that has imported the tests."""
    if (
        len(specs) < 2
        or not workers.is_possible()
        or any(not spec.popen or spec.python for spec in specs)
    ):
        return
    server = workers.Server(["--rootdir", str(config.rootpath), *config.args])
    config.add_cleanup(server.close)
    for spec in specs:
        spec.python = server.command()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Store the laws that an xdist worker collected: this process does not collect tests."""
    _of_workers.update(getattr(node, "workeroutput", {}).get("laws", {}))


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    return True if session.config.option.laws else None


def unstated(config: pytest.Config, laws: dict[str, Law]) -> list[str]:
    """Return laws that are nightly without justification: neither a reason nor a law that covers them."""
    if config.stash[NAMED]:
        return []
    files = {law.file for law in laws.values()}

    def is_stated(law: Law) -> bool:
        if law.default or not law.by:
            return bool(law.default or law.reason)
        is_collected = law.by.partition("::")[0] in files
        return not is_collected or (law.by in laws and laws[law.by].default > 0)

    return [key for key, law in laws.items() if not is_stated(law)]


def collected(config: pytest.Config) -> dict[str, Law]:
    """Return the laws that this process collected, or else those of the workers."""
    return config.stash.get(LAWS, {}) or {key: Law(**law) for key, law in _of_workers.items()}


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        return
    if unstated(config, collected(config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif config.option.laws or (
        config.option.share and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
    ):
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if FAILURES and not hasattr(config, "workerinput"):
        with open(FAILURES, "a", encoding="utf-8") as file:
            for report in terminalreporter.getreports("failed") + terminalreporter.getreports(
                "error"
            ):
                lines = report.longreprtext.splitlines()[-25:]
                file.write("\n".join([f"--- {report.nodeid} ({report.when})", *lines]) + "\n")
    laws = collected(config)
    if not laws:
        return
    if config.option.laws:
        for line in table(laws):
            terminalreporter.write_line(line)
    terminalreporter.write_sep("=", "laws")
    for line in summary(config, laws):
        terminalreporter.write_line(line)


def table(laws: dict[str, Law]) -> Iterator[str]:
    """Yield the lines of a table of laws: cases in the default tier, all cases, and shares of the nightly cases."""
    file = ""
    for law in sorted(laws.values(), key=lambda law: (law.file, law.name)):
        if law.file != file:
            file = law.file
            yield f"\n{file}\n{'default':>8}{'all':>6}  {'shares':<12}  law"
        shares = ",".join(map(str, sorted(law.shares)))
        yield f"{law.default:8d}{law.default + law.nightly:6d}  {shares or '-':<12}  {law.name}"


def summary(config: pytest.Config, laws: dict[str, Law]) -> Iterator[str]:
    """Yield the lines of the summary: numbers of laws and cases, the selection, and laws that are only nightly."""
    num_default_laws = sum(law.default > 0 for law in laws.values())
    num_chosen_laws = sum(law.chosen > 0 for law in laws.values())
    default = sum(law.default for law in laws.values())
    nightly = sum(law.nightly for law in laws.values())
    chosen = sum(law.chosen for law in laws.values())
    yield (
        f"{len(laws)} laws in {default + nightly} cases; "
        f"the default tier covers {num_default_laws} of them in {default} cases"
    )
    if config.stash[NAMED]:
        tier = "all cases of the named tests"
    elif config.option.all_tiers:
        tier = "all"
    elif config.option.share:
        tier = f"share {config.option.share} of {nightly} nightly cases"
    else:
        tier = "the default tier"
    yield f"selected: {tier}: {chosen} cases of {num_chosen_laws} laws"
    for law in laws.values():
        if not law.default and (law.reason or law.by):
            reason = f"{law.reason}: {law.by}" if law.by else law.reason
            yield f"only nightly: {law.file}::{law.name}: {reason}"
    for key in unstated(config, laws):
        yield (
            f"ERROR: {key} has no case in the default tier; mark fewer of its cases nightly, or add a reason: "
            '@pytest.mark.nightly("the reason"), or by="tests/file.py::law" with a law of the default tier'
        )


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """Extend the time limit of a test on a busy machine, as for all waits."""
    pytest_timeout.pytest_timeout_set_timer(
        item, settings._replace(timeout=patience.seconds(settings.timeout))
    )
    return True


DECISIVE = re.compile(
    r"(GROUP_|LOCAL_)?(RANK|WORLD_SIZE)|(MASTER|TORCHELASTIC|SHARDTRAIN|SLURM|HF|TRANSFORMERS|XDG)_.*|HOME|PATH"
)
"""Variables that change the behavior of commands, so tests must restore them. Libraries set others in their process."""


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    """Restore environment variables after each test, and fail tests that changed one of DECISIVE."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    changed = [name for name in changed if not name.startswith("PYTEST_")]
    for name in changed:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    not_restored = [name for name in changed if DECISIVE.fullmatch(name)]
    assert not not_restored, (
        f"the test changed environment variables without restoring them: {not_restored}"
    )


def _cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have exited and been waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write the cost of a test to COSTS. The first test that needs a fixture pays for it."""
    wall = time.monotonic()
    cpu = _cpu_seconds()
    result = yield
    if COSTS:
        wall_seconds = time.monotonic() - wall
        cpu_seconds = _cpu_seconds() - cpu
        line = {"test": item.nodeid, "wall": round(wall_seconds, 3), "cpu": round(cpu_seconds, 3)}
        with open(COSTS, "a") as file:
            file.write(json.dumps(line) + "\n")
    return result
