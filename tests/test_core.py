"""The core: a wheel without tools, other systems' commands and cluster platforms still trains."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import installed_wheel
import patience
import pytest

import shardtrain
from shardtrain import cli, config
from shardtrain.utils.errors import ConfigError

BEYOND_THE_CORE = ("tools", "compat", "launch/platforms")
SMALL = (
    "--training.steps=2 --training.seq_len=32 --training.local_batch_size=1 --model.overrides.num_layers=1 "
    "--training.device=cpu --lr_scheduler.warmup_steps=1"
)


class _WithoutTools:
    """A finder that behaves as if the part ``shardtrain.tools`` were not installed."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "shardtrain.tools":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.fixture
def without_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith(("shardtrain.api", "shardtrain.tools"))]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(shardtrain, "api", raising=False)
    monkeypatch.setattr(sys, "meta_path", [_WithoutTools, *sys.meta_path])


@pytest.mark.parametrize("name", shardtrain.__all__)
def test_a_name_of_the_python_api_reports_what_is_not_installed(name: str, without_tools: None) -> None:
    message = f"shardtrain.{name} needs shardtrain.tools, which is not installed; install the complete package"
    with pytest.raises(ImportError, match=message) as raised:
        getattr(shardtrain, name)
    assert "\n" not in str(raised.value) and raised.value.__suppress_context__


def test_a_launch_without_the_planner_reports_that_it_is_not_installed(without_tools: None) -> None:
    with pytest.raises(ConfigError, match=r"needs shardtrain.tools, which is not installed; install"):
        cli._refuse_unfit(config.load(None, [], preset="debug"), 2)


@pytest.mark.timeout(900)
@pytest.mark.nightly("a wheel is built", by="tests/test_house.py::test_no_two_rooms_import_each_other")
def test_the_core_trains_and_names_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    wheel = installed_wheel.build(tmp_path / "source", without=BEYOND_THE_CORE)
    programs = installed_wheel.install(wheel, tmp_path)
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
