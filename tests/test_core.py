"""The core: a wheel without tools, other systems' commands and cluster platforms still trains."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import core_tests
import installed_wheel
import patience
import pytest

import shardtrain
from shardtrain import cli, config
from shardtrain.utils.errors import ConfigError

ROOT = Path(__file__).parents[1]
SMALL = (
    "--training.steps=2 --training.seq_len=32 --training.local_batch_size=1 --model.overrides.num_layers=1 "
    "--training.device=cpu --lr_scheduler.warmup_steps=1"
)
SHARES = 10
"""The core's tests run in so many shares, one for each landing."""
MINUTES = 3
MOST_MINUTES = 15
"""Time of a share on a quiet and on a busy machine. Tests that have not begun by then are skipped."""
FEWEST_PASSED = 50
"""Tests that must have passed in this time."""
MOST_LEFT_OUT = 48
"""Test files of the core's rooms that need a part which the core lacks. It may become less, not more."""


class _WithoutTools:
    """A finder that behaves as if the part ``shardtrain.tools`` were not installed."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "shardtrain.tools":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [
        name for name in sys.modules if name.startswith(("shardtrain.api", "shardtrain.tools"))
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(shardtrain, "api", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_WithoutTools, *sys.meta_path])


@pytest.mark.parametrize("name", shardtrain.__all__)
def test_a_name_of_the_python_api_reports_what_is_not_installed(
    name: str, without_tools: None
) -> None:
    message = f"shardtrain.{name} needs shardtrain.tools, which is not installed; install the complete package"
    with pytest.raises(ImportError, match=message) as raised:
        getattr(shardtrain, name)
    assert "\n" not in str(raised.value)
    assert raised.value.__suppress_context__


def test_a_launch_without_the_planner_reports_that_it_is_not_installed(without_tools: None) -> None:
    with pytest.raises(
        ConfigError, match=r"needs shardtrain.tools, which is not installed; install"
    ):
        cli._refuse_unfit(config.load(None, [], preset="debug"), 2)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` folder of an environment with the core only."""
    folder = tmp_path_factory.mktemp("core")
    (folder / "source").mkdir()
    wheel = installed_wheel.build(folder / "source", without=core_tests.BEYOND)
    return installed_wheel.install(wheel, folder)


@pytest.mark.timeout(900)
@pytest.mark.nightly(
    "a wheel is built", by="tests/test_house.py::test_no_two_rooms_import_each_other"
)
def test_the_core_trains_and_names_what_is_missing(programs: Path, tmp_path: Path) -> None:
    for ranks in (1, 2):
        options = (*SMALL.split(), f"--nproc={ranks}", f"--job.dump_folder=outputs-{ranks}")
        installed_wheel.run(programs / "shardtrain", "train", "debug", *options, cwd=tmp_path)
        assert (tmp_path / f"outputs-{ranks}/metrics.jsonl").stat().st_size
    for message, part in (
        (("verify", "debug"), "shardtrain.tools"),
        (("launch", "slurm", "debug"), "shardtrain.launch.platforms"),
        (("config", "migrate", "x.json"), "shardtrain.compat"),
    ):
        done = subprocess.run(
            [programs / "shardtrain", *message],
            cwd=tmp_path,
            env=installed_wheel.environment_variables(),
            capture_output=True,
            text=True,
            timeout=patience.seconds(120),
            check=False,
        )
        assert done.returncode == 2
        assert f"needs {part}, which is not installed" in done.stderr
        assert done.stderr.count("\n") == 1


def test_few_files_of_the_core_need_what_it_lacks() -> None:
    """Test files that need a part outside the core are skipped. All others are in one of the shares."""
    left_out = [
        f"{path.relative_to(ROOT)}: {missing}"
        for path, missing in core_tests.files().items()
        if missing
    ]

    assert len(left_out) <= MOST_LEFT_OUT, "\n".join(left_out)

    shares = [core_tests.share(number, SHARES) for number in range(1, SHARES + 1)]
    assert sum(map(len, shares)) + len(left_out) == len(core_tests.files())
    assert all(shares)


@pytest.mark.timeout(2400)
@pytest.mark.nightly(
    "a wheel is built", by="tests/test_core.py::test_few_files_of_the_core_need_what_it_lacks"
)
def test_the_tests_of_the_core_pass_in_an_environment_without_tools(
    programs: Path, tmp_path: Path
) -> None:
    """Run one of ``SHARES`` shares of the test files. ``.ci/turn`` selects a different share for each landing."""
    (package,) = programs.parent.glob("lib/python*/site-packages/shardtrain")
    clone = tmp_path / "clone"
    core_tests.copy_clone(clone, package)
    share_number = int((ROOT / ".ci/turn").read_text()) % SHARES + 1
    # ``patience`` extends the limit on a busy machine.
    minutes = min(MOST_MINUTES, patience.seconds(60 * MINUTES) / 60)
    arguments = ("-P", "-m", "pytest", "-p", "no:cacheprovider", f"--minutes={minutes:.0f}")
    files = core_tests.share(share_number, SHARES)
    output = installed_wheel.run(
        programs / "python", *arguments, *files, cwd=clone, seconds=60 * (minutes + 5)
    )
    passed = re.search(r"(\d+) passed", output)

    assert passed is not None and int(passed[1]) >= FEWEST_PASSED, output[-2000:]
