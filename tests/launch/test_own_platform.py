"""User-defined platforms have the same interface as the built-in ones, support --dry-run, and fail in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtrain.launch.launch_command import main
from shardtrain.utils.errors import ConfigError

DEBUG = str(Path(__file__).parents[2] / "configs/debug.toml")
PLATFORM = """
import shlex
from pathlib import Path

def render(job, launch):
    lines = [f"export {name}={shlex.quote(value)}" for name, value in job.environment.items()]
    return "\\n".join([f"# {launch.name} on {job.nodes}", *lines, shlex.join(job.command)])

def submit(text, job, launch):
    Path(__file__).with_suffix(".queue").write_text(text)
    return f"mine/{launch.name}"
"""


def written(folder, text=PLATFORM):
    path = folder / "my_platform.py"
    path.write_text(text)
    return str(path)


def test_a_platform_file_shows_and_submits_the_same_text(tmp_path, capsys):
    arguments = [
        written(tmp_path),
        DEBUG,
        "--name",
        "first",
        "--nodes",
        "2",
        "--training.steps",
        "3",
    ]

    assert main([*arguments, "--dry-run"]) == 0

    dry_run = capsys.readouterr().out
    assert dry_run.startswith("# first on 2\n")
    assert "--training.steps 3" in dry_run

    queue = tmp_path / "my_platform.queue"
    assert not queue.exists()
    assert main(arguments) == 0
    assert capsys.readouterr().out == "mine/first\n"
    assert queue.read_text() + "\n" == dry_run


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a file"),
        (PLATFORM.replace("def submit", "def send"), "has no submit; define render"),
        (
            PLATFORM.replace('    return "', '    return lines and "').replace(
                "lines =", "return 7\n    lines ="
            ),
            "renders",
        ),
    ],
)
def test_a_file_that_is_not_a_platform_is_one_line(tmp_path, text, message):
    path = str(tmp_path / "my_platform.py") if text is None else written(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"shardtrain launch=.*my_platform.py.* {message}"):
        main([path, DEBUG])


FOLLOWED = """
def status(id):
    return f"{id} runs"

def stop(id):
    open(__file__ + ".stopped", "w").write(id)
"""


def test_job_verbs_call_the_platform_file(tmp_path, capsys):
    path = written(tmp_path, PLATFORM + FOLLOWED)
    assert main(["status", path, "mine/first"]) == 0
    assert capsys.readouterr().out == "mine/first runs\n"
    assert main(["stop", path, "mine/first"]) == 0
    assert capsys.readouterr().out == ""
    assert (tmp_path / "my_platform.py.stopped").read_text() == "mine/first"
    with pytest.raises(
        ConfigError, match=r"launch logs=.*my_platform.py.* has no logs; define logs\(id\)"
    ):
        main(["logs", path, "mine/first"])
    with pytest.raises(
        ConfigError, match="launch status=.* requires one ID; use an ID such as slurm/1234"
    ):
        main(["status", "slurm/1", "slurm/2"])
