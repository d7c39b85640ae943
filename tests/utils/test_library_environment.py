"""PyTorch starts and loads no code of the current directory or of another user."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import patience
import pytest

from shardtrain.config.schema import Comm
from shardtrain.distributed import process_group
from shardtrain.launch import environment
from shardtrain.utils import library_environment
from shardtrain.utils.errors import ConfigError

NOBODY = 65534


def _as_another_user(path: Path) -> None:
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)


def _as_a_link(path: Path) -> None:
    elsewhere = path.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    path.symlink_to(elsewhere)


def _with_mode(mode: int) -> Callable[[Path], None]:
    def plant(path: Path) -> None:
        path.mkdir()
        path.chmod(mode)

    return plant


PLANTED: dict[str, tuple[Callable[[Path], object], bool]] = {
    "nothing": (lambda path: None, True),
    "a folder of this user": (_with_mode(0o755), True),
    "a folder that everybody may write": (_with_mode(0o777), False),
    "a folder that a group may write": (_with_mode(0o770), False),
    "a folder of another user": (_as_another_user, False),
    "a link": (_as_a_link, False),
    "a dangling link": (lambda path: path.symlink_to(path.with_name("absent")), False),
    "a file": (Path.touch, False),
}


@pytest.mark.parametrize("is_torch_imported", [False, True])
@pytest.mark.parametrize("name", PLANTED)
def test_compiler_uses_a_folder_that_only_this_user_can_write(
    name: str, is_torch_imported: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's import sets the variable to the predictable default, whoever owns that folder."""
    plant, is_used = PLANTED[name]
    if plant is _as_another_user and os.geteuid() != 0:
        pytest.skip("only root can change the owner of a folder")
    monkeypatch.delenv(library_environment.COMPILER_CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("LOGNAME", "me")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shared = tmp_path / "torchinductor_me"
    if is_torch_imported:
        monkeypatch.setenv(library_environment.COMPILER_CACHE, str(shared))
    plant(shared)
    folder = library_environment.compiler_cache()

    assert folder == (shared if is_used else tmp_path / "cache/shardtrain/torchinductor")
    if name == "nothing":
        assert shared.stat().st_mode & 0o077 == 0


def test_default_folder_has_pytorchs_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    monkeypatch.delenv(library_environment.COMPILER_CACHE, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert str(library_environment.compiler_cache()) == places.default_cache_dir()


def test_folder_of_the_users_variable_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library_environment.COMPILER_CACHE, str(tmp_path))
    assert library_environment.compiler_cache() == tmp_path


UNUSABLE: dict[str, Callable[[Path], object]] = {
    "a file": Path.touch,
    "below a file": lambda path: path.parent.touch(),
    "a dangling link": lambda path: path.symlink_to(path.with_name("absent")),
    "a link to itself": lambda path: path.symlink_to(path),
    "read-only": lambda path: path.mkdir(mode=0o500),
    "in a read-only folder": lambda path: path.parent.mkdir(mode=0o500),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_folder_of_the_users_variable_is_refused(name: str, tmp_path: Path) -> None:
    """PyTorch's import creates the folder, so every verb would otherwise end with a traceback."""
    if "read-only" in name and os.geteuid() == 0:
        pytest.skip("root writes everywhere")
    path = tmp_path / "parent/cache" if "below" in name or "folder" in name else tmp_path / "cache"
    UNUSABLE[name](path)

    with pytest.raises(ConfigError) as caught:
        environment.set_process_defaults(
            {library_environment.COMPILER_CACHE: str(path)}, 1, 1, alone=True
        )

    start = "TORCHINDUCTOR_CACHE_DIR"
    fix = "name another folder, or unset it"
    assert str(caught.value).startswith(f'{start}="{path}" is not a folder that can be written: ')
    assert str(caught.value).endswith(fix)
    assert "\n" not in str(caught.value)


def test_missing_folder_of_the_users_variable_is_created(tmp_path: Path) -> None:
    path = tmp_path / "new/cache"
    environment.set_process_defaults(
        {library_environment.COMPILER_CACHE: str(path)}, 1, 1, alone=True
    )
    assert path.is_dir()


def test_child_of_a_library_imports_nothing_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler starts `python -c "from ctypes import cdll; ..."` in the current directory."""
    for name in ("PYTHONSAFEPATH", library_environment.COMPILER_CACHE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ctypes.py").write_text("open('imported', 'w')\ncdll = None\n")
    child = [sys.executable, "-c", "from ctypes import cdll"]
    before = dict(os.environ)
    with process_group.join(Comm(), "cpu"):
        subprocess.run(child, check=True, timeout=patience.seconds(60))

    assert not (tmp_path / "imported").exists()
    assert dict(os.environ) == before

    subprocess.run(child, check=True, timeout=patience.seconds(60))
    assert (tmp_path / "imported").exists(), "the planted module would run without the variable"


def test_compiler_probe_imports_nothing_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vector_instructions = pytest.importorskip("torch._inductor.cpu_vec_isa")
    if not hasattr(vector_instructions.VecISA, "_probe_load"):
        pytest.skip("this version of PyTorch has no such probe")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ctypes.py").write_text("open('imported', 'w')\ncdll = None\n")
    with library_environment.protected():
        vector_instructions.VecAVX2()._probe_load(str(tmp_path / "absent.so"))

    assert not (tmp_path / "imported").exists()
