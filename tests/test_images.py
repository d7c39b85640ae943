"""Laws of the CPU image, built and run: SHARDTRAIN_IMAGES=FOLDER, by root, with buildah and debootstrap of Debian.

No registry is needed: the base is made of Debian's packages, whose Python 3.11 stands for python:3.12-slim-bookworm.
pip is configured inside as outside, and folders that its configuration names are mounted while the image is built.
FOLDER keeps what was built for the next time.
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
    pytest.mark.skipif(not os.environ.get("SHARDTRAIN_IMAGES"), reason="builds an image: SHARDTRAIN_IMAGES=FOLDER"),
    pytest.mark.skipif(
        os.geteuid() != 0 or not (shutil.which("buildah") and shutil.which("debootstrap")),
        reason="wants root, buildah and debootstrap: apt-get install buildah debootstrap",
    ),
    pytest.mark.timeout(3600),
]


def tell(command: list[str], seconds: float = 1800) -> str:
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=patience.seconds(seconds), check=False
    )
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
    return done.stdout.strip()


def pip_volumes(folder: Path) -> list[str]:
    """Options that give pip in the build the configuration of pip out here, and the folders that it names."""
    told = tell([sys.executable, "-m", "pip", "config", "list"], 60)
    settings = re.findall(r"^global\.([\w-]+)='(.*)'$", told, re.MULTILINE)
    (folder / "pip.conf").write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings))
    words = [word for _, value in settings for word in value.split()]
    # an index of files leads to files beside it
    paths = [Path(word[7:]).parent if word.startswith("file://") else Path(word) for word in words]
    sources = {str(path) for path in paths if path.is_absolute() and path.exists()}
    volumes = [f"{folder}/pip.conf:/etc/pip.conf:ro", *(f"{one}:{one}:ro" for one in sorted(sources))]
    return [word for volume in volumes for word in ("--volume", volume)]


@pytest.fixture(scope="module")
def builder():
    """buildah with a store of its own, which has the base."""
    folder = Path(os.environ["SHARDTRAIN_IMAGES"]).absolute()
    folder.mkdir(exist_ok=True)
    store = ["--root", str(folder / "store"), "--runroot", str(folder / "runstore"), "--storage-driver", "overlay"]
    words = ["buildah", *store]
    if BASE not in tell([*words, "images", "--format", "{{.Name}}:{{.Tag}}"]):
        include = "--include=python3,python3-venv,ca-certificates"
        mirror = "http://deb.debian.org/debian"
        tell(["debootstrap", "--variant=minbase", include, "bookworm", str(folder / "base"), mirror])
        container = tell([*words, "from", "scratch"])
        tell([*words, "add", "--quiet", container, str(folder / "base"), "/"])
        tell([*words, "commit", "--quiet", "--rm", container, BASE])
    return words


@pytest.fixture(scope="module")
def image(builder, tmp_path_factory):
    arguments = ["--build-arg", f"BASE={BASE}", "--build-arg", "TORCH_INDEX=https://pypi.org/simple"]
    recipe = ["--file", "scripts/containers/Dockerfile.cpu", "--tag", "shardtrain:cpu", "."]
    volumes = pip_volumes(tmp_path_factory.mktemp("pip"))
    tell([*builder, "bud", "--layers", "--isolation", "chroot", *arguments, *volumes, *recipe])
    return "localhost/shardtrain:cpu"


def test_the_image_trains_as_no_root_and_saves_when_it_is_told_to_stop(builder, image, tmp_path):
    container = tell([*builder, "from", image])
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
    assert tell([*run, "--", "shardtrain", "--version"]).startswith("shardtrain ")
    assert tell([*run, "--", "id", "-u"]) == "1000" and tell([*run, "--", "pwd"]) == "/workspace"
    small = ["configs/debug.toml", "--nproc", "1", "--training.seq_len=32", "--training.local_batch_size=1",
             "--model.overrides.num_layers=1", "--metrics.log_freq=1"]  # fmt: skip
    tell([*run, "--", "shardtrain", "train", *small, "--training.steps=2", "--job.dump_folder=/runs/two"])
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
        # what a container's runtime does: the first process inside gets the signal
        (pid,) = [one for one in trainers(folder) if parent_of(one) not in trainers(folder)]
        os.kill(pid, signal.SIGTERM)
        assert process.wait(patience.seconds(120)) == 75
    finally:
        process.kill()
    assert newest(folder) == max(losses(folder))
    print(tell([*builder, "images", "--format", "{{.Name}} {{.Size}}"]))


def trainers(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0") if path.exists() else []
        if b"--job.dump_folder=/runs/stopped" in words and words[0].endswith(b"python3"):
            found.append(int(path.parent.name))
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
