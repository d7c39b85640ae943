"""Which tests run when: a default tier that states every law once, and the rest in shares, one for each landing.

A law is a test function; its cases are what it is run with. Cases marked ``nightly`` are the rest: they state the same
law at more sizes, meshes or seeds. ``pytest`` runs the default tier, ``--all`` everything, ``--share 2/5`` those of the
rest whose share it is, and ``--laws`` prints every law with where it runs. A test that is named by itself
(``tests/test_grid.py::test_name``) runs whole.

A case belongs to the share that the checksum of its name says, so that it stays there when others come and go.
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

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks would fight for cores
# what a command prints is compared whole, also on a machine so busy that it takes seconds
os.environ.setdefault("SHARDTRAIN_HEARTBEAT_SECONDS", "0")
# no folder can be made there: what tests launch is not remembered among what the user has launched
os.environ["XDG_STATE_HOME"] = os.devnull
# Each collection of a forked rank would look through all that the tests have imported, and so copy its pages: 28 %
# of what a rank of two steps costs
os.register_at_fork(after_in_child=gc.freeze)


def _forget_threads_that_compile() -> None:
    """In a fork of a process that has compiled: PyTorch's pool of threads has none here, and would be waited for."""
    compiling = sys.modules.get("torch._inductor.async_compile")
    if compiling is not None:
        compiling.AsyncCompile.pool.cache_clear()


os.register_at_fork(after_in_child=_forget_threads_that_compile)

SHARES = 5
"""In how many shares the rest is told by ``--laws``, and run by .ci/run."""
COSTS = os.environ.get("SHARDTRAIN_TEST_COSTS")
"""A file that gets a line of JSON for each test: its name, seconds that passed, CPU seconds with those of its ranks."""
FAILURES = os.environ.get("SHARDTRAIN_TEST_FAILURES")
"""A file to which the tests that failed are added, each with the end of its report: .ci/run prints it last."""
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
    # what all tests of a file share would be made again by each worker that takes some of them at the end
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
"""Files that wait long, compute much, or whose tests share what is dear."""


def cases(default: Iterable[Any], nightly: Iterable[Any]) -> list[Any]:
    """Values for ``pytest.mark.parametrize``: those of the default tier, and those of the rest; tuples are several."""

    def marked(value: Any) -> Any:
        if isinstance(value, tuple) and hasattr(value, "marks"):
            return value._replace(marks=[*value.marks, pytest.mark.nightly])
        return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly)

    return [*default, *map(marked, nightly)]


def chosen(request: pytest.FixtureRequest, name: str) -> set[Any]:
    """The values of parameter ``name`` in tests of this module that will run: what their fixture has to make."""
    return {
        item.callspec.params[name]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and name in getattr(getattr(item, "callspec", None), "params", {})
    }


def parse_share(text: str) -> tuple[int, int]:
    """``2/5`` -> (2, 5): the second of five shares. Raises pytest.UsageError."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise pytest.UsageError(f"--share={text}: it is K/N with 1 <= K <= N, such as 2/{SHARES}")
    return int(number), int(count)


def share_of(name: str, count: int = SHARES) -> int:
    """The share, from 1 to ``count``, to which a case belongs."""
    return zlib.crc32(name.encode()) % count + 1


@dataclass
class Law:
    """A test function, and how many of its cases there are."""

    file: str
    name: str
    default: int = 0
    nightly: int = 0
    chosen: int = 0
    """How many run now."""
    shares: dict[int, int] = field(default_factory=dict)
    """Nightly cases of each share of SHARES."""
    reason: str = ""
    """Why none is in the default tier."""
    by: str = ""
    """The law of the default tier that states the same, with less."""


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
"""Cases that are as good as marked nightly, because of what they were measured to cost."""
NAMED = pytest.StashKey[bool]()
"""Whether tests are named one by one."""
LAWS = pytest.StashKey[dict[str, Law]]()
_of_workers: dict[str, dict[str, Any]] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers", "which tests run")
    group.addoption("--all", action="store_true", dest="all_tiers", help="the default tier and the rest")
    group.addoption("--share", metavar="K/N", help="of the rest, the K-th of N shares; without the default tier")
    group.addoption("--minutes", type=float, metavar="N", help="skip, and say so, what has not begun after N minutes")
    group.addoption(
        "--backwards", action="store_true", help="files from the last to the first: what --minutes has left out, first"
    )
    group.addoption("--laws", action="store_true", help="print every law and where it runs; run nothing")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    if config.option.share:
        parse_share(config.option.share)
    if config.option.laws:  # in this process
        config.option.numprocesses, config.option.dist, config.option.tx = None, "no", []
    config.stash[NAMED] = any("::" in argument for argument in config.args)


_STARTED = time.monotonic()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out, aloud, what would begin after the time that the run was given."""
    minutes = item.config.option.minutes
    if minutes is not None and time.monotonic() - _STARTED > 60 * minutes:
        pytest.skip(f"left out: --minutes {minutes:g} are over")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Compute with PyTorch's own kernels again: a run in this process has chosen others, and they need other memory."""
    kernels = sys.modules.get("shardtrain.ops.chosen_kernels")
    if kernels is not None:
        kernels.use(kernels.PYTORCH)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of the package, only what has an example is looked through for examples."""
    if collection_path.suffix == ".py" and collection_path.is_relative_to(PACKAGE):
        return True if b">>>" not in collection_path.read_bytes() else None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Iterator[None]:
    """Look for examples in the package alone.

    A file that tests share would be imported once more for them, under another name: with a second of each class, of
    which one is registered with a library and another is what tests change.
    """
    found: list[pytest.Collector] = yield
    return [one for one in found if not isinstance(one, DoctestModule) or file_path.is_relative_to(PACKAGE)]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the collector of garbage: what is made stays, and it would look at all of it many times."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        return (yield)
    finally:
        if enabled:
            gc.enable()


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose among them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose what runs now; what takes longest first, so that no core is idle at the end."""
    config.stash.setdefault(NAMED, any("::" in argument for argument in config.args))
    laws: dict[str, Law] = {}
    chosen, others = [], []
    costly = {line for line in COSTLY.read_text(encoding="utf-8").splitlines() if not line.startswith("#")}
    for item in items:
        if item.nodeid in costly:
            item.add_marker(pytest.mark.nightly("costly.txt: a cheaper case states its law"))
        key = law_of(item)
        law = laws.setdefault(key, Law(*key.split("::", 1)))
        if marker := item.get_closest_marker("nightly"):
            law.nightly += 1
            law.shares[share_of(item.nodeid)] = law.shares.get(share_of(item.nodeid), 0) + 1
            law.reason, law.by = law.reason or " ".join(marker.args), law.by or marker.kwargs.get("by", "")
        else:
            law.default += 1
        runs = is_chosen(item, config)
        law.chosen += runs
        (chosen if runs else others).append(item)
    workers_input = getattr(config, "workerinput", {"workercount": 1})
    items[:] = dealt(chosen, workers_input["workercount"], config.option.backwards)
    config.stash[LAWS] = laws
    if others and not config.option.laws:
        config.hook.pytest_deselected(items=others)
    if hasattr(config, "workeroutput"):
        config.workeroutput["laws"] = {key: asdict(law) for key, law in laws.items()}


def pytest_collection_finish() -> None:
    """What was collected stays: a run in this process, which collects garbage, would look at all of it each time.

    What tests leave behind is small, and is looked for less often than by default: that was 5 % of their CPU time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def dealt(items: list[pytest.Item], num_workers: int, backwards: bool = False) -> list[pytest.Item]:
    """The order in which ``--dist worksteal`` gives each worker some of the longest files, and these first.

    It cuts the list into a slice for each worker, of as many tests as the others', and a worker that has none left
    takes from the end of another's. ``backwards``, the other files come from the last to the first, so that a run whose
    time is over leaves out others.
    """
    ranks = {name: place for place, name in enumerate(LONGEST_FIRST)}
    files: dict[Path, list[pytest.Item]] = {}
    others: dict[Path, list[pytest.Item]] = {}
    for item in items:
        (files if item.path.name in ranks else others).setdefault(item.path, []).append(item)
    rest = [item for file in (reversed(others) if backwards else others) for item in others[file]]
    slices: list[list[pytest.Item]] = [[] for _ in range(num_workers)]
    for file in sorted(files, key=lambda file: ranks[file.name]):
        # to the worker with the fewest files, of these to the one with the fewest tests
        min(slices, key=lambda slice_: (len({item.path for item in slice_}), len(slice_))).extend(files[file])
    found: list[pytest.Item] = []
    for number, slice_ in enumerate(slices):
        size = (len(items) - len(found)) // (num_workers - number)
        num_more = max(0, size - len(slice_))
        found += slice_ + rest[:num_more]
        del rest[:num_more]
    return found + rest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the workers of xdist from one process that has imported the tests."""
    if len(specs) < 2 or not workers.is_possible() or any(not spec.popen or spec.python for spec in specs):
        return
    server = workers.Server(["--rootdir", str(config.rootpath), *config.args])
    config.add_cleanup(server.close)
    for spec in specs:
        spec.python = server.command()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """What a worker of xdist has collected, which this process has not."""
    _of_workers.update(getattr(node, "workeroutput", {}).get("laws", {}))


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    return True if session.config.option.laws else None


def unstated(config: pytest.Config, laws: dict[str, Law]) -> list[str]:
    """Laws that have no case in the default tier, no reason, and no other law there that states the same."""
    if config.stash[NAMED]:
        return []
    files = {law.file for law in laws.values()}

    def is_stated(law: Law) -> bool:
        if law.default or not law.by:
            return bool(law.default or law.reason)
        collected = law.by.partition("::")[0] in files
        return not collected or (law.by in laws and laws[law.by].default > 0)

    return [key for key, law in laws.items() if not is_stated(law)]


def collected(config: pytest.Config) -> dict[str, Law]:
    found = config.stash.get(LAWS, {})
    return found or {key: Law(**law) for key, law in _of_workers.items()}


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        return
    if unstated(config, collected(config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    elif config.option.laws or (config.option.share and session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if FAILURES and not hasattr(config, "workerinput"):
        with open(FAILURES, "a", encoding="utf-8") as file:
            for report in terminalreporter.getreports("failed") + terminalreporter.getreports("error"):
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
    """Every law by file: cases in the default tier, in all, and in which shares the others are."""
    file = ""
    for law in sorted(laws.values(), key=lambda law: (law.file, law.name)):
        if law.file != file:
            file = law.file
            yield f"\n{file}\n{'default':>8}{'all':>6}  {'shares':<12}  law"
        shares = ",".join(map(str, sorted(law.shares)))
        yield f"{law.default:8d}{law.default + law.nightly:6d}  {shares or '-':<12}  {law.name}"


def summary(config: pytest.Config, laws: dict[str, Law]) -> Iterator[str]:
    """How many laws there are, how many the default tier states, and what ran."""
    stated = sum(bool(law.default) for law in laws.values())
    default, nightly, chosen = (
        sum(getattr(law, name) for law in laws.values()) for name in ("default", "nightly", "chosen")
    )
    yield f"{len(laws)} laws in {default + nightly} cases; the default tier states {stated} of them in {default} cases"
    if config.stash[NAMED]:
        tier = "the tests named, whole"
    elif config.option.all_tiers:
        tier = "all"
    elif config.option.share:
        tier = f"of the rest ({nightly} cases), share {config.option.share}"
    else:
        tier = "the default tier"
    yield f"chosen: {tier}: {chosen} cases of {sum(bool(law.chosen) for law in laws.values())} laws"
    for law in laws.values():
        if not law.default and (law.reason or law.by):
            stated = f"{law.reason}: {law.by}" if law.by else law.reason
            yield f"only in the rest: {law.file}::{law.name}: {stated}"
    for key in unstated(config, laws):
        yield (
            f"ERROR: {key} has no case in the default tier; mark fewer of its cases nightly, or say why: "
            '@pytest.mark.nightly("the reason"), or by="tests/file.py::law" of the default tier that states the same'
        )


def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool:
    """A test's limit is longer on a busy machine, as all its waits are."""
    pytest_timeout.pytest_timeout_set_timer(item, settings._replace(timeout=patience.seconds(settings.timeout)))
    return True


DECISIVE = re.compile(
    r"(GROUP_|LOCAL_)?(RANK|WORLD_SIZE)|(MASTER|TORCHELASTIC|SHARDTRAIN|SLURM|HF|TRANSFORMERS|XDG)_.*|HOME|PATH"
)
"""Variables that change what a command does. Others are set by libraries for their own process, and are taken back."""


@pytest.fixture(autouse=True)
def environment_as_it_was() -> Iterator[None]:
    """No test depends on what an earlier one has left in the environment."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    changed = [name for name in changed if not name.startswith("PYTEST_")]
    for name in changed:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    left = [name for name in changed if DECISIVE.fullmatch(name)]
    assert not left, f"the test has changed variables of the environment and left them so: {', '.join(left)}"


def _cpu_seconds() -> float:
    """Of this process and of those children that have ended and been waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Write what a test costs, with the fixtures that it is the first to need."""
    wall, cpu = time.monotonic(), _cpu_seconds()
    result = yield
    if COSTS:
        line = {"test": item.nodeid, "wall": round(time.monotonic() - wall, 3), "cpu": round(_cpu_seconds() - cpu, 3)}
        with open(COSTS, "a") as file:
            file.write(json.dumps(line) + "\n")
    return result
