"""A run only writes below its folder, does not follow planted links, and creates no world-writable files."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import sys
import threading
from pathlib import Path

import forked
import patience
import pytest
from small_checkpoint import checkpoints, save, world_of_one
from tiny import text_file

from shardtrain import config
from shardtrain.checkpoint import retention
from shardtrain.config.options import options
from shardtrain.config.rules.safety_rules import ALSO_ELSEWHERE, BELOW_DUMP_FOLDER, ONE_NAME
from shardtrain.utils import atomic_io
from shardtrain.utils.errors import ConfigError

ESCAPES = [
    "..", "../x", "a/../../x", "/x", "//x", "~/x", "x\\..\\y", "a\0b", "a\nb", "a\x1b[2J", "x" * 300, "a/b/../../../x"
]  # fmt: skip


@pytest.mark.parametrize(
    ("option", "path"), list(itertools.product((*BELOW_DUMP_FOLDER, *ONE_NAME), ESCAPES))
)
def test_path_outside_the_run_folder_is_refused(option: str, path: str) -> None:
    if option in ALSO_ELSEWHERE and path.startswith("/"):
        return
    if option == "metrics.save_log_file":
        path += "/{rank}"
    loaded = config.load(None, [f"--{option}={path}"])

    assert any(problem.option == option for problem in config.check(loaded))


def test_every_option_with_an_output_path_has_a_rule() -> None:
    endings = ("folder", "save_log_file", "save_config_file", "prefix")
    input_folders = {"data.image_folder"}
    names = {name for name in options() if name.endswith(endings)} - input_folders
    names -= {"job.dump_folder"}
    assert names == {*BELOW_DUMP_FOLDER, *ONE_NAME}


def test_default_names_and_absolute_checkpoint_folder_are_allowed() -> None:
    assert not config.check(config.load(None, ["--checkpoint.folder", "/scratch/checkpoints"]))


@pytest.mark.parametrize("name", ["step-1.trash-ab12", "step-1.tmp-ab12", "step-1"])
def test_deleting_does_not_follow_links(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious"
    folder = tmp_path / "checkpoint"
    precious.mkdir()
    folder.mkdir()
    (precious / "file").write_text("kept")
    (folder / name).symlink_to(precious, target_is_directory=True)
    if name == "step-1":
        retention.discard(folder / name)
    else:
        retention.sweep(folder, "ffff", now=2.0**40)

    assert (precious / "file").read_text() == "kept"
    assert not list(folder.iterdir()), "the link was not deleted"


def test_link_inside_a_deleted_checkpoint_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("kept")
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1/link").symlink_to(tmp_path / "precious", target_is_directory=True)
    retention.discard(tmp_path / "step-1")

    assert (tmp_path / "precious/file").read_text() == "kept"


def test_link_instead_of_a_file_is_replaced_without_writing_to_its_target(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "exit.json").symlink_to(tmp_path / "precious")
    atomic_io.write(tmp_path / "exit.json", "new")

    assert (tmp_path / "precious").read_text() == "kept"
    assert (tmp_path / "exit.json").read_text() == "new"
    assert not (tmp_path / "exit.json").is_symlink()


def test_repeatedly_planted_link_never_redirects_a_write(tmp_path: Path) -> None:
    """An attacker may cause errors by planting links continuously, but no byte may reach the target of a link."""
    precious = tmp_path / "precious"
    log = tmp_path / "log"
    ended = threading.Event()
    precious.write_text("kept")

    def plant() -> None:
        while not ended.is_set():
            with contextlib.suppress(OSError):
                (tmp_path / "next").symlink_to(precious)
                (tmp_path / "next").replace(log)

    thread = threading.Thread(target=plant)
    thread.start()
    try:
        for _ in range(300):
            with (
                contextlib.suppress(OSError),
                open(log, "ab", opener=atomic_io.open_file) as file,
            ):
                file.write(b"a line")
            atomic_io.write(log, "all of it")
    finally:
        ended.set()
        thread.join()

    assert precious.read_text() == "kept"


def test_world_writable_checkpoint_folder_is_refused_unless_allowed(tmp_path: Path) -> None:
    with world_of_one():
        private = checkpoints(tmp_path)
        assert private.to_continue() is None
        save(private, 3)
        private.close()
        (tmp_path / "checkpoint").chmod(0o777)
        for options_given in ({}, {"load_only": True}):
            refused = checkpoints(tmp_path, **options_given)
            with pytest.raises(ConfigError, match="allow_shared_writable"):
                refused.to_continue()
            refused.close()
        allowed = checkpoints(tmp_path, allow_shared_writable=True)

        assert allowed.to_continue() == tmp_path / "checkpoint/step-3"

        allowed.close()


def test_run_writes_nothing_world_writable_and_nothing_outside_its_folder(tmp_path: Path) -> None:
    """The run has umask 0, which protects nothing. The test also checks the temporary folder."""
    temporary = tmp_path / "tmp"
    outputs = tmp_path / "outputs"
    temporary.mkdir()
    options_given = {
        "job.dump_folder": outputs, "training.dataset": "text", "training.dataset_path": text_file(),
        "training.device": "cpu", "training.local_batch_size": 1, "training.seq_len": 32, "training.steps": 2,
        "lr_scheduler.warmup_steps": 1,
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in options_given.items()]
    command = [
        sys.executable,
        "-m",
        "shardtrain",
        "train",
        "--nproc",
        "1",
        *arguments,
        "--checkpoint.enable",
    ]
    environment = {
        **os.environ,
        "TMPDIR": str(temporary),
        "PYTHONPATH": str(Path(config.__file__).parents[2]),
    }
    done = forked.run(
        command,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
        umask=0,
    )

    assert done.returncode == 0, done.stderr

    written = [path for path in outputs.rglob("*") if not path.is_symlink()]
    assert len(written) > 5
    assert not [path for path in (outputs, *written) if path.stat().st_mode & stat.S_IWOTH]
    assert {path.name for path in tmp_path.iterdir()} == {"tmp", "outputs"}
    assert not [path for path in temporary.rglob("*") if path.name.startswith("shardtrain")]


def test_temporary_names_are_unpredictable() -> None:
    allowed = (
        # inspect the temporary folder without choosing names in it
        "tools/doctor/storage_checks.py",
        "cli.py",
        # uses a folder whose name all ranks know, if only this user has access (test_local_users.py)
        "distributed/rendezvous/private_store.py",
        # finds leftovers of killed processes (tests/utils/test_temporary.py)
        "utils/temporary.py",
        # checks the owner of the compiler's folder before PyTorch uses it (tests/utils/test_library_environment.py)
        "utils/library_environment.py",
    )
    package = Path(config.__file__).parents[1]
    for path in package.rglob("*.py"):
        if path.relative_to(package).as_posix() in allowed:
            continue
        text = path.read_text(encoding="utf-8")
        assert "/tmp/" not in text, path
        assert "gettempdir" not in text, path
        assert "mktemp(" not in text, path
