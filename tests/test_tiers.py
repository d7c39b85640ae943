"""Laws of the tiers: nothing is lost between them, and no law is only in the rest without a reason."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import patience
import pytest
from tiers import LONGEST_FIRST, SHARES, dealt, share_of

TESTS = Path(__file__).parent
SAMPLE = """
import pytest
from tiers import cases

@pytest.mark.parametrize("size", cases(default=[1, 2], nightly=[3, *range(10, 40)]))
def test_sizes(size):
    pass

@pytest.mark.parametrize(("a", "b"), cases(default=[(1, 2)], nightly=[(3, 4), pytest.param(5, 6, id="last")]))
def test_pairs(a, b):
    assert b == a + 1

def test_alone():
    pass
"""


class Item:
    """What ``dealt`` asks of a test."""

    def __init__(self, file: str, number: int) -> None:
        self.path, self.name = Path(file), f"{file}::{number}"


@pytest.mark.parametrize("num_workers", [1, 2, 6, 16])
def test_each_worker_begins_with_one_of_the_longest_files_and_runs_it_whole(num_workers):
    rest = [Item(f"test_rest_{number}.py", case) for number in range(90) for case in range(1 + number % 9)]
    longest = [Item(name, case) for name in LONGEST_FIRST for case in range(3)]
    order = dealt([*rest, *longest], num_workers)
    assert sorted(map(id, order)) == sorted(map(id, [*rest, *longest]))
    left, begun = list(order), []
    for number in range(num_workers):  # as xdist cuts it
        size = len(left) // (num_workers - number)
        slice_, left = left[:size], left[size:]
        names = [item.path.name for item in slice_]
        assert names[0] in LONGEST_FIRST
        own = [name for name in LONGEST_FIRST if name in names]
        assert names[: 3 * len(own)] == [name for name in dict.fromkeys(names) if name in own for _ in range(3)]
        begun += own
    assert sorted(begun) == sorted(LONGEST_FIRST)


def test_what_a_run_that_ends_early_leaves_out_comes_first_backwards():
    items = [Item(name, case) for name in ("test_a.py", LONGEST_FIRST[0], "test_b.py", "test_c.py") for case in (0, 1)]
    for backwards, files in (
        (False, ["test_a.py", "test_b.py", "test_c.py"]),
        (True, ["test_c.py", "test_b.py", "test_a.py"]),
    ):
        order = dealt(items, 1, backwards)
        assert [item.name for item in order] == [
            f"{file}::{case}" for file in (LONGEST_FIRST[0], *files) for case in (0, 1)
        ]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[int, list[str], str]:
    """Status, names of the tests that ran, and output."""
    costs = folder / "costs.jsonl"
    costs.write_text("")
    names = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    names |= {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(TESTS),
        "SHARDTRAIN_TEST_COSTS": str(costs),
        "SHARDTRAIN_TEST_FAILURES": str(folder / "failures.txt"),
    }
    marker = "markers=nightly: a law at more sizes or cases"
    command = [sys.executable, "-m", "pytest", "-p", "pytest_timeout", "-p", "xdist.plugin", "-p", "tiers", "-q"]
    done = subprocess.run(
        [*command, "-o", marker, "--strict-markers", "--rootdir=.", "-p", "no:cacheprovider", *arguments],
        cwd=folder, env=names, capture_output=True, text=True, timeout=patience.seconds(60), check=False,
    )  # fmt: skip
    ran = [json.loads(line)["test"].partition("::")[2] for line in costs.read_text().splitlines()]
    return done.returncode, sorted(ran), done.stdout + done.stderr


def test_the_default_tier_and_the_shares_are_all_tests_each_once(folder):
    _, everything, _ = run(folder, "--all")
    assert len(everything) == len(set(everything)) == 2 + 31 + 3 + 1
    code, default, said = run(folder)
    assert code == 0 and default == ["test_alone", "test_pairs[1-2]", "test_sizes[1]", "test_sizes[2]"]
    assert "3 laws in 37 cases; the default tier states 3 of them in 4 cases" in said
    shares = [run(folder, f"--share={number}/3")[1] for number in range(1, 4)]
    assert all(shares) and sorted([*default, *(name for share in shares for name in share)]) == everything
    assert run(folder, "--share=2/3", "--backwards")[1] == shares[1]


def test_workers_run_and_tell_the_same(folder):
    code, ran, said = run(folder, "-n2", "--dist=worksteal", "--share=1/2")
    assert (code, ran) == run(folder, "--share=1/2")[:2]
    assert "3 laws in 37 cases; the default tier states 3 of them in 4 cases" in said
    assert f"of the rest (33 cases), share 1/2: {len(ran)} cases" in said


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_what_failed_is_written_once_with_its_reason(folder, workers):
    (folder / "test_wrong.py").write_text("def test_wrong():\n    assert 1 == 2\n")
    status, _, _ = run(folder, *workers)
    failures = (folder / "failures.txt").read_text()
    assert status == 1
    assert re.findall("^--- (.*)$", failures, re.MULTILINE) == ["test_wrong.py::test_wrong (call)"]
    assert "assert 1 == 2" in failures


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_a_file_that_cannot_be_imported_fails_the_run(folder, workers):
    """Workers are forks of a process that has imported the file before: its rest there must not pass for the file."""
    (folder / "test_broken.py").write_text("import nothing_of_this_name\n\ndef test_a():\n    pass\n")
    status, _, said = run(folder, *workers, "--import-mode=importlib")
    assert status != 0 and "No module named 'nothing_of_this_name'" in said


def test_what_tests_share_is_imported_once(folder):
    tests = folder / "tests"
    tests.mkdir()
    (tests / "shared.py").write_text("with open('imported', 'a') as file:\n    file.write(__name__ + '\\n')\n")
    (tests / "test_a.py").write_text("import shared\n\ndef test_a():\n    pass\n")
    code, ran, _ = run(folder, "--import-mode=importlib", "--doctest-modules", "-o", "pythonpath=tests", "tests")
    assert (code, ran) == (0, ["test_a"])
    assert (folder / "imported").read_text().split() == ["shared"]


def test_a_test_that_is_named_runs_whole_and_a_file_in_its_tier(folder):
    assert len(run(folder, "test_sample.py::test_pairs")[1]) == 3
    assert run(folder, "test_sample.py::test_sizes[3]")[1] == ["test_sizes[3]"]
    assert len(run(folder, "test_sample.py")[1]) == 4


def test_a_law_that_is_only_in_the_rest_wants_a_reason(folder):
    test = "import pytest\n@pytest.mark.nightly{}\ndef test_of_hours():\n    pass\n"
    (folder / "test_more.py").write_text(test.format(""))
    code, ran, said = run(folder)
    assert code == 1 and len(ran) == 4 and "test_more.py::test_of_hours has no case in the default tier" in said
    assert run(folder, "-n1")[0] == 1
    assert run(folder, "test_more.py::test_of_hours")[:2] == (0, ["test_of_hours"])
    (folder / "test_more.py").write_text(test.format('("it takes hours")'))
    code, _, said = run(folder)
    assert code == 0 and "only in the rest: test_more.py::test_of_hours: it takes hours" in said


def test_a_law_may_be_stated_by_another_that_is_in_the_default_tier(folder):
    test = 'import pytest\n@pytest.mark.nightly("on pods", by="{}")\ndef test_on_pods():\n    pass\n'
    (folder / "test_more.py").write_text(test.format("test_sample.py::test_alone"))
    code, _, said = run(folder)
    assert code == 0 and "only in the rest: test_more.py::test_on_pods: on pods: test_sample.py::test_alone" in said
    for name in ("test_sample.py::test_gone", "test_more.py::test_on_pods"):  # not there, or not in the default tier
        (folder / "test_more.py").write_text(test.format(name))
        code, _, said = run(folder)
        assert code == 1 and "test_more.py::test_on_pods has no case in the default tier" in said
    (folder / "test_more.py").write_text(test.format("test_sample.py::test_gone"))
    assert run(folder, "test_more.py")[0] in (0, pytest.ExitCode.NO_TESTS_COLLECTED), "that file was not asked for"


def test_the_table_names_every_law_with_its_cases_and_shares_and_runs_nothing(folder):
    code, ran, said = run(folder, "--laws")
    assert code == 0 and ran == []
    rows = re.findall(r"^ +(\d+) +(\d+)  ([\d,-]+) +(test_\w+)$", said, re.MULTILINE)
    shares = sorted({share_of(f"test_sample.py::test_pairs[{name}]") for name in ("3-4", "last")})
    assert rows == [
        ("1", "1", "-", "test_alone"),
        ("1", "3", ",".join(map(str, shares)), "test_pairs"),
        ("2", "33", ",".join(map(str, range(1, SHARES + 1))), "test_sizes"),
    ]


@pytest.mark.parametrize("share", ["0/5", "6/5", "2", "a/b"])
def test_a_share_that_there_is_not_is_reported(folder, share):
    code, ran, said = run(folder, f"--share={share}")
    assert code == pytest.ExitCode.USAGE_ERROR and not ran and f"--share={share}: it is K/N" in said


def test_a_case_stays_in_its_share():
    # else as many landings in a row as there are shares, which bring tests of their own, would not run everything
    names = (
        "tests/test_grid.py::test_each_family[2-tp]",
        "tests/test_cli.py::test_help",
        "tests/test_kills.py::test_[3]",
    )
    assert [share_of(name, 5) for name in names] == [3, 1, 2]


def limits(text: str) -> list[str]:
    """Calls that wait no longer than a number of seconds that is written there, two or more."""

    def is_number(node: ast.expr) -> bool:
        return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value >= 2

    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            named = [word.value for word in node.keywords if word.arg == "timeout"]
            waits = node.func.attr in ("run", "communicate", "wait", "join", "get", "poll")
            alone = node.args if node.func.attr in ("wait", "join", "poll") and len(node.args) == 1 else []
            if waits and any(map(is_number, [*named, *alone])):
                found.append(ast.unparse(node))
        elif isinstance(node, ast.BinOp) and ast.unparse(node.left) == "time.monotonic()" and is_number(node.right):
            found.append(ast.unparse(node))
    return found


def test_every_wait_of_a_test_grows_with_the_load():
    offenders = {path.name: found for path in TESTS.rglob("*.py") if (found := limits(path.read_text()))}
    assert offenders == {}, "wait for patience.seconds(...)"
    wrong = ["p.wait(20)", "subprocess.run(c, timeout=60)", "p.communicate(timeout=9.5)", "end = time.monotonic() + 60"]
    assert all(limits(line) for line in wrong)
    assert not limits('p.wait(patience.seconds(20)); ", ".join(words); x.get(7); p.join(0.1); p.wait()')


def test_a_limit_is_longer_on_a_busy_machine_and_never_shorter(monkeypatch):
    monkeypatch.delenv("SHARDTRAIN_TEST_PATIENCE", raising=False)
    monkeypatch.setattr(patience, "load", lambda: 1.0)
    quiet = patience.seconds(10)
    monkeypatch.setattr(patience, "load", lambda: 8.0)
    assert quiet >= 10 and patience.seconds(10) == pytest.approx(8 * quiet)
    monkeypatch.setenv("SHARDTRAIN_TEST_PATIENCE", "3")
    assert patience.seconds(10) == pytest.approx(24 * quiet)


def test_a_wait_ends_where_the_condition_never_comes(monkeypatch):
    monkeypatch.setattr(patience, "factor", lambda: 1.0)
    with pytest.raises(AssertionError, match="the moon does not come within 0 s"):
        patience.wait_for(lambda: False, 0.05, "the moon")
    patience.wait_for(lambda: True, 0.05)
