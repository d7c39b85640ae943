"""The tiers cover all tests, and a law is only nightly if it has a reason."""

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

def test_single():
    pass
"""


class Item:
    """The attributes of a test that ``dealt`` uses."""

    def __init__(self, file: str, number: int) -> None:
        self.path = Path(file)
        self.name = f"{file}::{number}"


def items_of(file: str, num_cases: int) -> list[Item]:
    return [Item(file, case) for case in range(num_cases)]


@pytest.mark.parametrize("num_workers", [1, 2, 6, 16])
def test_each_worker_starts_with_one_of_the_longest_files(num_workers):
    short = []
    for number in range(90):
        short += items_of(f"test_short_{number}.py", 1 + number % 9)
    longest = []
    for name in LONGEST_FIRST:
        longest += items_of(name, 3)
    order = dealt([*short, *longest], num_workers)

    assert sorted(map(id, order)) == sorted(map(id, [*short, *longest]))

    undivided = list(order)
    started = []
    for number in range(num_workers):  # divide the list among workers like xdist
        size = len(undivided) // (num_workers - number)
        names = [item.path.name for item in undivided[:size]]
        undivided = undivided[size:]
        assert names[0] in LONGEST_FIRST

        # All cases of a long file are next to each other.
        long_files = [name for name in dict.fromkeys(names) if name in LONGEST_FIRST]
        cases_of_long_files = []
        for name in long_files:
            cases_of_long_files += [name] * 3
        assert names[: len(cases_of_long_files)] == cases_of_long_files
        started += long_files

    assert sorted(started) == sorted(LONGEST_FIRST)


def test_backwards_reverses_the_other_files():
    items = []
    for name in ("test_a.py", LONGEST_FIRST[0], "test_b.py", "test_c.py"):
        items += items_of(name, 2)
    for backwards, files in (
        (False, ["test_a.py", "test_b.py", "test_c.py"]),
        (True, ["test_c.py", "test_b.py", "test_a.py"]),
    ):
        order = dealt(items, 1, backwards)

        expected = []
        for file in (LONGEST_FIRST[0], *files):
            expected += [f"{file}::0", f"{file}::1"]
        assert [item.name for item in order] == expected


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "test_sample.py").write_text(SAMPLE)
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[int, list[str], str]:
    """Run pytest in a folder. Return the exit status, the names of the tests that ran, and the output."""
    costs = folder / "costs.jsonl"
    costs.write_text("")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    environment |= {
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": str(TESTS),
        "SHARDTRAIN_TEST_COSTS": str(costs),
        "SHARDTRAIN_TEST_FAILURES": str(folder / "failures.txt"),
    }
    marker = "markers=nightly: a law at more sizes or cases"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "pytest_timeout",
        "-p",
        "xdist.plugin",
        "-p",
        "tiers",
        "-q",
    ]
    done = subprocess.run(
        [*command, "-o", marker, "--strict-markers", "--rootdir=.", "-p", "no:cacheprovider", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=patience.seconds(60), check=False,
    )  # fmt: skip
    ran = [json.loads(line)["test"].partition("::")[2] for line in costs.read_text().splitlines()]
    return done.returncode, sorted(ran), done.stdout + done.stderr


def test_default_tier_and_shares_partition_all_tests(folder):
    _, everything, _ = run(folder, "--all")
    assert len(everything) == len(set(everything)) == 2 + 31 + 3 + 1
    code, default, output = run(folder)
    assert code == 0
    assert default == ["test_pairs[1-2]", "test_single", "test_sizes[1]", "test_sizes[2]"]
    assert "3 laws in 37 cases; the default tier covers 3 of them in 4 cases" in output

    shares = [run(folder, f"--share={number}/3")[1] for number in range(1, 4)]
    assert all(shares)
    assert sorted([*default, *shares[0], *shares[1], *shares[2]]) == everything
    assert run(folder, "--share=2/3", "--backwards")[1] == shares[1]


def test_workers_run_and_report_the_same_tests(folder):
    code, ran, output = run(folder, "-n2", "--dist=worksteal", "--share=1/2")
    assert (code, ran) == run(folder, "--share=1/2")[:2]
    assert "3 laws in 37 cases; the default tier covers 3 of them in 4 cases" in output
    assert f"share 1/2 of 33 nightly cases: {len(ran)} cases" in output


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_failure_is_written_once_with_its_reason(folder, workers):
    (folder / "test_wrong.py").write_text("def test_wrong():\n    assert 1 == 2\n")
    status, _, _ = run(folder, *workers)
    failures = (folder / "failures.txt").read_text()

    assert status == 1
    assert re.findall("^--- (.*)$", failures, re.MULTILINE) == ["test_wrong.py::test_wrong (call)"]
    assert "assert 1 == 2" in failures


@pytest.mark.parametrize("workers", [[], ["-n", "2"]])
def test_a_file_that_cannot_be_imported_fails_the_run(folder, workers):
    """Workers are forks of a process that tried to import the file. They must not reuse its incomplete module."""
    (folder / "test_broken.py").write_text(
        "import nothing_of_this_name\n\ndef test_a():\n    pass\n"
    )
    status, _, output = run(folder, *workers, "--import-mode=importlib")
    assert status != 0
    assert "No module named 'nothing_of_this_name'" in output


def test_shared_test_helper_is_imported_once(folder):
    tests = folder / "tests"
    tests.mkdir()
    (tests / "shared.py").write_text(
        "with open('imported', 'a') as file:\n    file.write(__name__ + '\\n')\n"
    )
    (tests / "test_a.py").write_text("import shared\n\ndef test_a():\n    pass\n")
    code, ran, _ = run(
        folder, "--import-mode=importlib", "--doctest-modules", "-o", "pythonpath=tests", "tests"
    )

    assert (code, ran) == (0, ["test_a"])
    assert (folder / "imported").read_text().split() == ["shared"]


def test_named_test_runs_all_cases_and_named_file_its_tier(folder):
    assert len(run(folder, "test_sample.py::test_pairs")[1]) == 3
    assert run(folder, "test_sample.py::test_sizes[3]")[1] == ["test_sizes[3]"]
    assert len(run(folder, "test_sample.py")[1]) == 4


def test_nightly_only_law_requires_a_reason(folder):
    test = "import pytest\n@pytest.mark.nightly{}\ndef test_of_hours():\n    pass\n"
    (folder / "test_more.py").write_text(test.format(""))
    code, ran, output = run(folder)

    assert code == 1
    assert len(ran) == 4
    assert "test_more.py::test_of_hours has no case in the default tier" in output
    assert run(folder, "-n1")[0] == 1
    assert run(folder, "test_more.py::test_of_hours")[:2] == (0, ["test_of_hours"])

    (folder / "test_more.py").write_text(test.format('("it takes hours")'))
    code, _, output = run(folder)
    assert code == 0
    assert "only nightly: test_more.py::test_of_hours: it takes hours" in output


def test_nightly_only_law_may_name_a_law_of_the_default_tier(folder):
    test = (
        'import pytest\n@pytest.mark.nightly("on pods", by="{}")\ndef test_on_pods():\n    pass\n'
    )
    (folder / "test_more.py").write_text(test.format("test_sample.py::test_single"))
    code, _, output = run(folder)

    assert code == 0
    assert (
        "only nightly: test_more.py::test_on_pods: on pods: test_sample.py::test_single" in output
    )

    # The law that ``by`` names must exist and have a case in the default tier.
    for name in (
        "test_sample.py::test_gone",
        "test_more.py::test_on_pods",
    ):
        (folder / "test_more.py").write_text(test.format(name))
        code, _, output = run(folder)
        assert code == 1
        assert "test_more.py::test_on_pods has no case in the default tier" in output
    (folder / "test_more.py").write_text(test.format("test_sample.py::test_gone"))

    assert run(folder, "test_more.py")[0] in (0, pytest.ExitCode.NO_TESTS_COLLECTED), (
        "the other file was not collected"
    )


def test_laws_option_lists_every_law_and_runs_nothing(folder):
    code, ran, output = run(folder, "--laws")
    assert code == 0
    assert ran == []

    rows = re.findall(r"^ +(\d+) +(\d+)  ([\d,-]+) +(test_\w+)$", output, re.MULTILINE)
    shares = sorted({share_of(f"test_sample.py::test_pairs[{name}]") for name in ("3-4", "last")})
    assert rows == [
        ("1", "3", ",".join(map(str, shares)), "test_pairs"),
        ("1", "1", "-", "test_single"),
        ("2", "33", ",".join(map(str, range(1, SHARES + 1))), "test_sizes"),
    ]


@pytest.mark.parametrize("share", ["0/5", "6/5", "2", "a/b"])
def test_invalid_share_is_rejected(folder, share):
    code, ran, output = run(folder, f"--share={share}")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert not ran
    assert f"--share={share} must be K/N" in output


def test_share_of_a_case_never_changes():
    # CI runs one share at a time. If new tests moved others to another share, five runs in a row would not
    # run every case.
    names = (
        "tests/test_grid.py::test_each_family[2-tp]",
        "tests/test_cli.py::test_help",
        "tests/test_kills.py::test_[3]",
    )

    assert [share_of(name, 5) for name in names] == [3, 1, 2]


def limits(text: str) -> list[str]:
    """Return the calls with a literal timeout of two seconds or more."""

    def is_number(node: ast.expr) -> bool:
        return (
            isinstance(node, ast.Constant)
            and isinstance(node.value, int | float)
            and node.value >= 2
        )

    lines = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            method = node.func.attr
            if method not in ("run", "communicate", "wait", "join", "get", "poll"):
                continue
            timeouts = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
            if method in ("wait", "join", "poll") and len(node.args) == 1:
                timeouts += node.args
            if any(map(is_number, timeouts)):
                lines.append(ast.unparse(node))
        elif (
            isinstance(node, ast.BinOp)
            and ast.unparse(node.left) == "time.monotonic()"
            and is_number(node.right)
        ):
            lines.append(ast.unparse(node))
    return lines


def test_every_wait_of_a_test_is_extended_under_load():
    offenders = {path.name: limits(path.read_text()) for path in TESTS.rglob("*.py")}
    assert not any(offenders.values()), "wait for patience.seconds(...)"
    wrong = [
        "p.wait(20)",
        "subprocess.run(c, timeout=60)",
        "p.communicate(timeout=9.5)",
        "end = time.monotonic() + 60",
    ]

    assert all(limits(line) for line in wrong)
    assert not limits(
        'p.wait(patience.seconds(20)); ", ".join(words); x.get(7); p.join(0.1); p.wait()'
    )


def test_waits_are_longer_on_a_busy_machine(monkeypatch):
    monkeypatch.delenv("SHARDTRAIN_TEST_PATIENCE", raising=False)
    monkeypatch.setattr(patience, "load", lambda: 1.0)
    quiet = patience.seconds(10)
    monkeypatch.setattr(patience, "load", lambda: 8.0)

    assert quiet >= 10
    assert patience.seconds(10) == pytest.approx(8 * quiet)

    monkeypatch.setenv("SHARDTRAIN_TEST_PATIENCE", "3")
    assert patience.seconds(10) == pytest.approx(24 * quiet)


def test_wait_for_fails_after_its_timeout(monkeypatch):
    monkeypatch.setattr(patience, "factor", lambda: 1.0)
    with pytest.raises(AssertionError, match="the moon does not come within 0 s"):
        patience.wait_for(lambda: False, 0.05, "the moon")
    patience.wait_for(lambda: True, 0.05)
