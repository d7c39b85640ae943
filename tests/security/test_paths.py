"""A run writes below its own folder, follows no planted link, and makes no file that everybody may write."""

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


@pytest.mark.parametrize(("option", "path"), list(itertools.product((*BELOW_DUMP_FOLDER, *ONE_NAME), ESCAPES)))
def test_a_name_that_leads_out_of_the_run_is_refused(option: str, path: str) -> None:
    if option in ALSO_ELSEWHERE and path.startswith("/"):
        return
    path = path + "/{rank}" if option == "metrics.save_log_file" else path
    loaded = config.load(None, [f"--{option}={path}"])
    assert any(problem.option == option for problem in config.check(loaded))


def test_every_option_that_names_a_place_to_write_is_ruled() -> None:
    words = ("folder", "save_log_file", "save_config_file", "prefix")
    named = {name for name in options() if name.endswith(words)} - {"job.dump_folder"}
    assert named == {*BELOW_DUMP_FOLDER, *ONE_NAME}


def test_the_names_of_the_defaults_are_allowed() -> None:
    assert not config.check(config.load(None, ["--checkpoint.folder", "/scratch/checkpoints"]))


@pytest.mark.parametrize("name", ["step-1.trash-ab12", "step-1.tmp-ab12", "step-1"])
def test_deleting_follows_no_link(tmp_path: Path, name: str) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "checkpoint"
    precious.mkdir()
    folder.mkdir()
    (precious / "file").write_text("kept")
    (folder / name).symlink_to(precious, target_is_directory=True)
    if name == "step-1":
        retention.discard(folder / name)
    else:
        retention.sweep(folder, "ffff", now=2.0**40)
    assert (precious / "file").read_text() == "kept"
    assert not list(folder.iterdir()), "the link is gone"


def test_a_link_inside_a_deleted_checkpoint_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("kept")
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1/link").symlink_to(tmp_path / "precious", target_is_directory=True)
    retention.discard(tmp_path / "step-1")
    assert (tmp_path / "precious/file").read_text() == "kept"


def test_a_link_in_place_of_a_file_is_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "exit.json").symlink_to(tmp_path / "precious")
    atomic_io.write(tmp_path / "exit.json", "new")
    assert (tmp_path / "precious").read_text() == "kept"
    assert (tmp_path / "exit.json").read_text() == "new" and not (tmp_path / "exit.json").is_symlink()


def test_a_link_that_is_planted_again_and_again_is_never_written_through(tmp_path: Path) -> None:
    """Somebody who plants links as fast as he can; an error is allowed, and a byte of ours elsewhere is not."""
    precious, log, ended = tmp_path / "precious", tmp_path / "log", threading.Event()
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


def test_a_folder_of_checkpoints_that_everybody_may_write_is_refused_unless_reported(tmp_path: Path) -> None:
    with world_of_one():
        kept = checkpoints(tmp_path)
        assert kept.to_continue() is None
        save(kept, 3)
        kept.close()
        (tmp_path / "checkpoint").chmod(0o777)
        for options_given in ({}, {"load_only": True}):
            refused = checkpoints(tmp_path, **options_given)
            with pytest.raises(ConfigError, match="allow_shared_writable"):
                refused.to_continue()
            refused.close()
        told = checkpoints(tmp_path, allow_shared_writable=True)
        assert told.to_continue() == tmp_path / "checkpoint/step-3"
        told.close()


def test_a_run_writes_nothing_that_everybody_may_write_and_nothing_outside(tmp_path: Path) -> None:
    """Under the umask that protects least; the temporary folder of the system is looked at too."""
    temporary, outputs = tmp_path / "tmp", tmp_path / "outputs"
    temporary.mkdir()
    options_given = {
        "job.dump_folder": outputs, "training.dataset": "text", "training.dataset_path": text_file(),
        "training.device": "cpu", "training.local_batch_size": 1, "training.seq_len": 32, "training.steps": 2,
        "lr_scheduler.warmup_steps": 1,
    }  # fmt: skip
    words = [word for name, value in options_given.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "shardtrain", "train", "--nproc", "1", *words, "--checkpoint.enable"]
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(Path(config.__file__).parents[2])}
    done = forked.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=patience.seconds(120), umask=0
    )
    assert done.returncode == 0, done.stderr
    written = [path for path in outputs.rglob("*") if not path.is_symlink()]
    assert len(written) > 5
    assert not [path for path in (outputs, *written) if path.stat().st_mode & stat.S_IWOTH]
    assert {path.name for path in tmp_path.iterdir()} == {"tmp", "outputs"}
    assert not [path for path in temporary.rglob("*") if path.name.startswith("shardtrain")]


def test_temporary_names_cannot_be_foreseen() -> None:
    package = Path(config.__file__).parents[1]
    for path in package.rglob("*.py"):
        # the first two look at the folder of temporary files itself, and give no name in it; the third takes a folder
        # that all ranks know by name, if it is this user's alone (``test_local_users.py``); the fourth looks for what
        # killed processes have left (``tests/utils/test_temporary.py``); the fifth checks who owns the compiler's
        # folder before PyTorch uses it (``tests/utils/test_library_environment.py``)
        allowed = (
            "tools/doctor/storage_checks.py",
            "cli.py",
            "distributed/rendezvous/private_store.py",
            "utils/temporary.py",
            "utils/library_environment.py",
        )
        if path.relative_to(package).as_posix() in allowed:
            continue
        text = path.read_text(encoding="utf-8")
        assert "/tmp/" not in text and "gettempdir" not in text and "mktemp(" not in text, path
