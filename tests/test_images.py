"""The CPU image builds and trains. Requires SHARDTRAIN_IMAGES=FOLDER, root, and buildah and debootstrap of Debian.

The tests need no registry: the base image consists of Debian's packages, with Python 3.11 instead of
python:3.12-slim-bookworm. pip in the image has the configuration of this machine, and folders that it names are mounted
during the build. FOLDER caches the images for the next run.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import patience
import pytest
from launched import losses, newest, wait_for

ROOT = Path(__file__).parents[1]
BASE = "localhost/python:3.11-slim-bookworm"

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("SHARDTRAIN_IMAGES"), reason="builds an image: SHARDTRAIN_IMAGES=FOLDER"
    ),
    pytest.mark.skipif(
        os.geteuid() != 0 or not (shutil.which("buildah") and shutil.which("debootstrap")),
        reason="requires root, buildah and debootstrap: apt-get install buildah debootstrap",
    ),
    pytest.mark.timeout(3600),
]


def output_of(command: list[str], seconds: float = 1800) -> str:
    """Run a command that must succeed. Return its output."""
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience.seconds(seconds),
        check=False,
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
    return done.stdout.strip()


def pip_volumes(folder: Path) -> list[str]:
    """Return build options that mount pip's configuration of this machine, and the folders that it names."""
    listing = output_of([sys.executable, "-m", "pip", "config", "list"], 60)
    settings = re.findall(r"^global\.([\w-]+)='(.*)'$", listing, re.MULTILINE)
    lines = ["[global]"]
    sources = set()
    for name, text in settings:
        lines.append(f"{name} = {text}")
        for value in text.split():
            path = Path(value)
            if value.startswith("file://"):  # an index in a file refers to files next to it
                path = Path(value.removeprefix("file://")).parent
            if path.is_absolute() and path.exists():
                sources.add(str(path))
    (folder / "pip.conf").write_text("\n".join(lines) + "\n")

    options = ["--volume", f"{folder}/pip.conf:/etc/pip.conf:ro"]
    for source in sorted(sources):
        options += ["--volume", f"{source}:{source}:ro"]
    return options


@pytest.fixture(scope="module")
def builder():
    """The buildah command with its own store, which contains the base image."""
    folder = Path(os.environ["SHARDTRAIN_IMAGES"]).absolute()
    folder.mkdir(exist_ok=True)
    store = [
        "--root",
        str(folder / "store"),
        "--runroot",
        str(folder / "runstore"),
        "--storage-driver",
        "overlay",
    ]
    command = ["buildah", *store]
    if BASE not in output_of([*command, "images", "--format", "{{.Name}}:{{.Tag}}"]):
        include = "--include=python3,python3-venv,ca-certificates"
        mirror = "http://deb.debian.org/debian"
        output_of(
            ["debootstrap", "--variant=minbase", include, "bookworm", str(folder / "base"), mirror]
        )
        container = output_of([*command, "from", "scratch"])
        output_of([*command, "add", "--quiet", container, str(folder / "base"), "/"])
        output_of([*command, "commit", "--quiet", "--rm", container, BASE])
    return command


@pytest.fixture(scope="module")
def image(builder, tmp_path_factory):
    arguments = [
        "--build-arg",
        f"BASE={BASE}",
        "--build-arg",
        "TORCH_INDEX=https://pypi.org/simple",
    ]
    recipe = ["--file", "scripts/containers/Dockerfile.cpu", "--tag", "shardtrain:cpu", "."]
    volumes = pip_volumes(tmp_path_factory.mktemp("pip"))
    output_of([*builder, "bud", "--layers", "--isolation", "chroot", *arguments, *volumes, *recipe])
    return "localhost/shardtrain:cpu"


def test_image_trains_as_non_root_and_saves_when_it_is_stopped(builder, image, tmp_path):
    container = output_of([*builder, "from", image])
    tmp_path.chmod(0o777)
    run = [
        *builder,
        "run",
        "--isolation",
        "chroot",
        "--volume",
        f"{tmp_path}:/runs",
        "--env",
        "OMP_NUM_THREADS=1",
        container,
    ]

    assert output_of([*run, "--", "shardtrain", "--version"]).startswith("shardtrain ")
    assert output_of([*run, "--", "id", "-u"]) == "1000"
    assert output_of([*run, "--", "pwd"]) == "/workspace"

    small = ["configs/debug.toml", "--nproc", "1", "--training.seq_len=32", "--training.local_batch_size=1",
             "--model.overrides.num_layers=1", "--metrics.log_freq=1"]  # fmt: skip
    output_of(
        [
            *run,
            "--",
            "shardtrain",
            "train",
            *small,
            "--training.steps=2",
            "--job.dump_folder=/runs/two",
        ]
    )

    assert list(losses(tmp_path / "two")) == [1, 2]

    folder = tmp_path / "stopped"
    long = [
        "--training.steps=100000",
        "--training.on_data_end=repeat",
        "--checkpoint.enable",
        "--job.dump_folder=/runs/stopped",
    ]
    process = subprocess.Popen([*run, "--", "shardtrain", "train", *small, *long])
    try:
        wait_for(lambda: (folder / "metrics.jsonl").exists() and losses(folder), 600)
        # signal the first process in the container, like a container runtime
        (first_pid,) = [pid for pid in trainers(folder) if parent_of(pid) not in trainers(folder)]
        os.kill(first_pid, signal.SIGTERM)
        assert process.wait(patience.seconds(120)) == 75
    finally:
        process.kill()

    assert newest(folder) == max(losses(folder))

    print(output_of([*builder, "images", "--format", "{{.Name}} {{.Size}}"]))


def trainers(folder: Path) -> list[int]:
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        command = path.read_bytes().split(b"\0") if path.exists() else []
        if b"--job.dump_folder=/runs/stopped" in command and command[0].endswith(b"python3"):
            pids.append(int(path.parent.name))
    return pids


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
