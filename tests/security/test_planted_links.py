"""A run only writes into its own folder, even if someone plants links there before or during its start."""

from __future__ import annotations

import ast
import contextlib
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import patience
import pytest
import storage_faults
import torch.distributed as dist
from ports import free_port
from tiers import cases
from tiny import shallow_config, text_file

import shardtrain
from shardtrain.checkpoint.lease import Lease
from shardtrain.config import Loaded
from shardtrain.config.machine_rules import machine_notes
from shardtrain.config.rules.safety_rules import FILES_OF_A_RUN
from shardtrain.config.schema import Config
from shardtrain.launch import failure, local
from shardtrain.launch.node_reports import NodeReports
from shardtrain.train import trainer
from shardtrain.utils import atomic_io
from shardtrain.utils.errors import Problem, StorageError

PACKAGE = Path(shardtrain.__file__).parent
STEPS = 3
WRITE_FLAGS = {"O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC"}
WRITERS = {
    "write_text",
    "write_bytes",
    "touch",
    "mkstemp",
    "NamedTemporaryFile",
    "save_file",
    "SummaryWriter",
}

NOT_OF_A_RUN = {
    "cli.py": "/dev/null",
    "checkpoint/objects.py": "an object store",
    "config/options_page.py": "pages of the repository",
    "data/tokenizers/open_tokenizer.py": "a temporary folder",
    "distributed/compile.py": "the cache of compiled kernels",
    "distributed/cpu/mapped_memory.py": "shared memory",
    "distributed/rendezvous/private_store.py": "the rendezvous folder, with mode 0700",
    "compat/fmengine/folders.py": "a converted checkpoint, in a new folder",
    "compat/fmengine/launching.py": "commands for the user's PATH",
    "hf/source.py": "a temporary folder",
    "launch/failure.py": "exit.json where the run folder is full: a temporary file",
    "launch/job_status.py": "the state folder of the user",
    "launch/local.py": "the temporary folder of a launch",
    "launch/platforms/ssh_connections.py": "the state folder of the user",
    "train/model_check.py": "a temporary folder",
    "utils/private_network.py": "/proc",
    "utils/process.py": "/dev/null",
    "utils/temporary.py": "the mark of a temporary folder",
}
"""Modules outside ``tools/`` that open files for writing themselves, and which files."""


def written(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of a module that open a file for writing without ``atomic_io.open_file``."""
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        is_writer = name_of(call.func) in WRITERS
        opens = name_of(call.func) == "open" and opens_a_path(call)
        if is_writer or (opens and opens_for_writing(call)):
            yield call.lineno


def opens_a_path(call: ast.Call) -> bool:
    """True if a call of ``open`` gets a path, and no opener that refuses links."""
    for keyword in call.keywords:
        if keyword.arg == "opener" and name_of(keyword.value) == "open_file":
            return False
    first = call.args[0] if call.args else None
    is_descriptor = isinstance(first, ast.Name) and first.id == "descriptor"
    return not is_descriptor and not isinstance(first, ast.Call)


def opens_for_writing(call: ast.Call) -> bool:
    """True if a call of ``open`` or ``os.open`` has a mode or flags for writing."""
    values = [*call.args, *(keyword.value for keyword in call.keywords)]
    for value in values:
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            is_mode = len(value.value) < 4
            if is_mode and set(value.value) & set("wax+"):
                return True
    for argument in call.args:
        for part in ast.walk(argument):
            if isinstance(part, ast.Attribute) and part.attr in WRITE_FLAGS:
                return True
    return False


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_one_function_opens_all_files_that_a_run_writes() -> None:
    lines_of_modules = {}
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        is_of_other_tools = name.startswith("tools/") and not name.startswith("tools/data/")
        if is_of_other_tools or name == "utils/atomic_io.py":
            continue
        lines = [*written(ast.parse(path.read_text(encoding="utf-8")))]
        if lines:
            lines_of_modules[name] = lines

    assert lines_of_modules.keys() - NOT_OF_A_RUN == set(), lines_of_modules


def config_of(folder: Path) -> Config:
    """Return a configuration that writes every kind of file that a run on CPUs can write."""
    config = shallow_config(
        job={"dump_folder": str(folder), "save_config_file": "config.toml"},
        model={
            "overrides": {
                "num_layers": 1,
                "dim": 32,
                "num_heads": 2,
                "num_kv_heads": 2,
                "ffn_dim": 32,
            }
        },
        training={"seq_len": 16, "local_batch_size": 1, "global_batch_size": 2, "steps": STEPS},
        checkpoint={"enable": True, "interval": 1, "keep_latest_k": 2, "async_mode": "async"},
        metrics={"enable_tensorboard": True, "log_freq": 1},
        profiling={
            "enable_profiling": True,
            "profile_freq": 2,
            "profiler_warmup": 1,
            "profiler_active": 1,
        },
        validation={"enable": True, "dataset": "text", "dataset_path": None, "freq": 2, "steps": 1},
    )
    return replace(
        config, validation=replace(config.validation, dataset_path=config.training.dataset_path)
    )


def files_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def test_run_opens_its_files_relative_to_a_folder_descriptor(tmp_path: Path) -> None:
    """An audit hook in the launcher and ranks sees no file opened for writing by a path in the run folder."""
    config = config_of(tmp_path / "run")
    report = os.open(tmp_path / "report", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def look(event: str, arguments: tuple[object, ...]) -> None:
        if (
            event != "open"
            or not isinstance(arguments[0], str)
            or not isinstance(arguments[2], int)
        ):
            return
        path, _, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            kind = "path" if os.path.abspath(path).startswith(f"{tmp_path}/run/") else "name"
            os.write(report, f"{kind} {path}\n".encode())

    def launch() -> None:
        sys.addaudithook(look)
        storage_faults._launch(config, 2, None, False, tmp_path / "terminal", trainer.main, False)

    # Audit hooks cannot be removed, so the run has its own process.
    process = multiprocessing.get_context("fork").Process(target=launch)
    process.start()
    process.join(patience.seconds(120))
    assert process.exitcode == 0, (tmp_path / "terminal").read_text()

    opened = (tmp_path / "report").read_text().splitlines()
    assert [line for line in opened if line.startswith("path")] == []
    # The hook saw the files of a run, under names relative to a descriptor.
    names = {line.removeprefix("name ") for line in opened}
    assert {
        "metrics.jsonl",
        "goodput.jsonl",
        "rank-1.log",
        "rank-1.out",
        "manifest.json",
        "rank-00001.bin",
    } <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert any(name.startswith(".exit.json.") for name in names)


def symbolic(path: Path, precious: Path) -> None:
    path.symlink_to(precious)


def to_nothing(path: Path, precious: Path) -> None:
    path.symlink_to(precious.with_name(f"new-{precious.name}"))


def hard(path: Path, precious: Path) -> None:
    path.hardlink_to(precious)


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("plant", cases([symbolic], nightly=[to_nothing, hard, pipe]))
def test_links_instead_of_files_of_a_run_never_redirect_a_write(
    plant: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    """A first run yields the names of all files, so the test covers new kinds of files automatically."""
    first = config_of(tmp_path / "first")
    second = config_of(tmp_path / "second")
    code, output = storage_faults.run(first, 2, None)
    assert code == 0, output

    # Names of all files of a run, except those in checkpoints.
    names = []
    for path in files_below(tmp_path / "first"):
        name = path.relative_to(tmp_path / "first")
        if not any(part.startswith("step-") for part in name.parts[1:2]):
            names.append(name)
    top_level = {str(name) for name in names if len(name.parts) == 1}
    assert top_level == {*FILES_OF_A_RUN, "config.toml"} - {"samples.jsonl"}
    expected = {"logs/rank-1.out", "logs/rank-1.err", "exit.json", "metrics.jsonl"}
    assert expected <= {str(name) for name in names}

    # The same run, with a link in the place of each of these files.
    (tmp_path / "precious").mkdir()
    for number, name in enumerate([*names, Path(".exit.json.reserved")]):
        precious = tmp_path / f"precious/{number}"
        precious.write_text("kept")
        (tmp_path / "second" / name).parent.mkdir(parents=True, exist_ok=True)
        plant(tmp_path / "second" / name, precious)
    code, output = storage_faults.run(second, 2, None)
    assert code == 0, output

    # The targets of the links are unchanged, and the run has its metrics.
    assert {path.read_text() for path in (tmp_path / "precious").iterdir()} == {"kept"}
    assert len(list((tmp_path / "precious").iterdir())) == len(names) + 1
    assert len((tmp_path / "second/metrics.jsonl").read_text().splitlines()) >= STEPS


FOLDERS = {
    "checkpoint": "checkpoint.folder",
    "tb": "metrics.save_tb_folder",
    "logs": "metrics.save_log_file",
    "profile_traces": "profiling.save_traces_folder",
    "profile_traces/deeper": "profiling.save_traces_folder",
    "memory_snapshot": "profiling.save_memory_snapshot_folder",
    "comm_traces": "comm.save_traces_folder",
    "wandb": "job.dump_folder",
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_linked_folder_is_refused_at_start_with_its_target(folder: str, tmp_path: Path) -> None:
    def link_problems(config: Config) -> list[Problem]:
        return [problem for problem in machine_notes(Loaded(config)) if "link" in problem.rule]

    run = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    config = config_of(run)
    config = replace(
        config, profiling=replace(config.profiling, save_traces_folder="profile_traces/deeper")
    )

    assert not link_problems(config)

    elsewhere.mkdir()
    (run / folder).parent.mkdir(parents=True, exist_ok=True)
    (run / folder).symlink_to(elsewhere)
    problems = link_problems(config)

    assert FOLDERS[folder] in {problem.option for problem in problems}
    assert all(f"{run / folder}, a link to {elsewhere}" in problem.rule for problem in problems)

    # Both fixes work, and a run that writes no checkpoints may have the link.
    if folder == "checkpoint":
        assert problems[0].fix == f"remove the link, or set checkpoint.folder to {elsewhere}"
        target_folder = replace(
            config, checkpoint=replace(config.checkpoint, folder=str(elsewhere))
        )
        assert not link_problems(target_folder)
        no_saves = replace(config, checkpoint=replace(config.checkpoint, load_only=True))
        assert not link_problems(no_saves)

    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("folder", ["checkpoint", "logs"])
def test_folder_that_is_a_link_to_itself_is_refused_at_start(folder: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / folder).symlink_to(folder)
    rules = [problem.rule for problem in machine_notes(Loaded(config_of(tmp_path / "run")))]
    assert any(f"a link to {folder}, which a run does not follow" in rule for rule in rules)


@pytest.mark.parametrize(
    ("target", "is_offered"),
    [("checkpoint", False), ("file", False), ("folder", True), ("gone", True)],
)
def test_target_of_a_link_is_offered_as_checkpoint_folder_only_if_it_works(
    target: str, is_offered: bool, tmp_path: Path
) -> None:
    run_folder = tmp_path / "run"
    (run_folder / "folder").mkdir(parents=True)
    (run_folder / "file").touch()
    (run_folder / "checkpoint").symlink_to(target)
    problems = machine_notes(Loaded(config_of(run_folder)))
    elsewhere = "use another folder"
    if is_offered:
        elsewhere = f"set checkpoint.folder to {run_folder / target}"

    (problem,) = (problem for problem in problems if problem.option == "checkpoint.folder")
    assert problem.fix == f"remove the link, or {elsewhere}"


ENABLED_BY = {
    "tb": ("metrics", "enable_tensorboard"),
    "profile_traces": ("profiling", "enable_profiling"),
    "profile_traces/deeper": ("profiling", "enable_profiling"),
    "memory_snapshot": ("profiling", "enable_memory_snapshot"),
    "wandb": ("metrics", "enable_wandb"),
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_file_with_the_name_of_a_folder_is_refused_at_start(folder: str, tmp_path: Path) -> None:
    """Only if the run writes to the folder. Otherwise a file named wandb does no harm."""

    def problems(config: Config) -> list[Problem]:
        notes = machine_notes(Loaded(config))
        return [problem for problem in notes if "not a folder" in problem.rule]

    def with_option(config: Config, section: str, option: str, value: object) -> Config:
        changed = replace(getattr(config, section), **{option: value})
        return replace(config, **{section: changed})

    config = config_of(tmp_path / "run")
    config = with_option(config, "profiling", "save_traces_folder", "profile_traces/deeper")
    path = tmp_path / "run" / folder
    path.parent.mkdir(parents=True)
    path.touch()
    if folder in ENABLED_BY:
        section, option = ENABLED_BY[folder]
        assert not problems(with_option(config, section, option, False))
        config = with_option(config, section, option, True)

    (problem,) = problems(config)
    assert problem.option == FOLDERS[folder]
    assert problem.rule == f"leads through {path}, which is not a folder"


def test_folder_with_the_name_of_a_file_is_refused_at_start(tmp_path: Path) -> None:
    """Otherwise the run ends with status 0 and without its metrics."""
    for name in (*FILES_OF_A_RUN, "config.toml"):
        (tmp_path / "run" / name).mkdir(parents=True)
    rules = [problem.rule for problem in machine_notes(Loaded(config_of(tmp_path / "run")))]
    names = (*FILES_OF_A_RUN, "config.toml")

    assert rules == [
        f"contains a folder {name}, but a run writes a file with this name" for name in names
    ]


@pytest.mark.parametrize(("path", "absent"), [
    ("absent/../run", "absent"), ("file/../run", "file"), ("../here/absent/../run", "../here/absent"),
    ("run", None), ("../run", None), ("a/../run", None), ("a/../../run", None),
])  # fmt: skip
def test_run_folder_with_dots_after_an_absent_folder_is_refused(
    path: str, absent: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here/a").mkdir(parents=True)
    (tmp_path / "here/file").touch()
    monkeypatch.chdir(tmp_path / "here")
    rules = [problem.rule for problem in machine_notes(Loaded(config_of(Path(path))))]
    expected = []
    if absent:
        expected = [f"leads through {absent}/.., but {absent} is not a folder"]
    assert rules == expected


def test_folder_that_becomes_a_link_after_the_checks_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run.mkdir()
    for name in ("logs", "checkpoint"):
        (run / name).symlink_to(elsewhere)

    with pytest.raises(
        StorageError, match=rf"{run}/logs is a link to {elsewhere}, which a run does not follow"
    ):
        local.prepare(run, note_killed=True)
    with pytest.raises(
        OSError, match=rf"{run}/checkpoint is a link to {elsewhere}, which a run does not follow"
    ):
        Lease(run / "checkpoint").acquire()
    assert not list(elsewhere.iterdir())

    atomic_io.guard()


def test_node_report_does_not_follow_a_linked_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The link may be planted on any node after its checks."""
    run = tmp_path / "run"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run.mkdir()
    (run / "logs").symlink_to(elsewhere)
    store = dist.HashStore()

    def node(number: int) -> int:
        reports = NodeReports(store, "run", number, 2, first_rank=number)
        cause = reports.explain([failure.killed(number, 9, 10.0)], False, run)
        assert cause is not None
        return cause.exit_code

    atomic_io.guard(run)
    try:
        with ThreadPoolExecutor(2) as nodes:
            assert [*nodes.map(node, range(2))] == [6, 6]
    finally:
        atomic_io.guard()

    assert not list(elsewhere.iterdir())

    rule = f"{run}/logs is a link to {elsewhere}, which a run does not follow"
    lines = capsys.readouterr().err.splitlines()
    assert sorted(lines) == [
        f"warning: {run}/logs/node-{number}.json is not written: {rule}" for number in (0, 1)
    ]


FILES_OF_NODES = (
    "exit.json", ".exit.json.reserved", "metrics.jsonl", "goodput.jsonl", "logs/node-0.json", "logs/node-1.json",
    "logs/rank-0.log", "logs/rank-1.log", "logs/rank-1.out", "logs/rank-1.err",
)  # fmt: skip
FOLDERS_OF_NODES = ("logs", "tb", "checkpoint", "profile_traces")


def train_on_two_nodes(homes: list[Path], *more: str) -> list[tuple[int, str]]:
    """Run two agents of this machine, each in its folder. Return their exit statuses and output."""
    port = free_port()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "SHARDTRAIN_LOCAL_ADDR": "127.0.0.1",
    }
    options = [
        "--nproc=1", "--job.dump_folder=run", "--training.dataset=text", f"--training.dataset_path={text_file()}",
        "--training.device=cpu", "--training.seq_len=32", "--training.local_batch_size=1", "--training.steps=4",
        "--model.overrides.num_layers=1", "--lr_scheduler.warmup_steps=1", "--metrics.enable_tensorboard",
        "--profiling.enable_profiling", "--profiling.profile_freq=2", "--profiling.profiler_warmup=1",
        "--profiling.profiler_active=1", "--checkpoint.interval=2", *more,
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        agents = []
        for number, home in enumerate(homes):
            place = ["--nnodes=2", f"--node_rank={number}", f"--rdzv_endpoint=127.0.0.1:{port}"]
            command = [sys.executable, "-P", "-m", "shardtrain", "train", "debug", *place, *options]
            agent = subprocess.Popen(
                command, cwd=home, env=environment, stderr=subprocess.PIPE, text=True
            )
            stack.callback(agent.kill)
            agents.append(agent)
        with ThreadPoolExecutor(2) as readers:
            limit = patience.seconds(120)
            outputs = list(readers.map(lambda agent: agent.communicate(timeout=limit)[1], agents))
    return [(agent.returncode, output) for agent, output in zip(agents, outputs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "planted_on"),
    cases(
        [("files", 0)],
        nightly=[("files", 1), *((folder, node) for folder in FOLDERS_OF_NODES for node in (0, 1))],
    ),
)
def test_two_nodes_write_nothing_through_planted_links(
    name: str, planted_on: int, tmp_path: Path
) -> None:
    """Node 0 has a link in a folder that both nodes share. Node 1 has a link on its own disk."""
    homes = [tmp_path / "a", tmp_path / "a"]
    if planted_on == 1:
        homes[1] = tmp_path / "b"
    precious = tmp_path / "precious"
    precious.mkdir()
    names = FILES_OF_NODES if name == "files" else (name,)
    for number, planted in enumerate(names):
        link = homes[planted_on] / "run" / planted
        link.parent.mkdir(parents=True, exist_ok=True)
        target = precious / str(number)
        if name == "files":
            target.write_text("kept")
        else:
            target.mkdir()
            (target / "inside").write_text("kept")
        link.symlink_to(target)
    for home in homes:
        home.mkdir(exist_ok=True)

    saves = name == "checkpoint" or planted_on == 0
    ends = train_on_two_nodes(homes, f"--checkpoint.enable={'true' if saves else 'false'}")

    # The targets of the links are unchanged.
    targets = [path for path in precious.rglob("*") if path.is_file()]
    assert len(targets) == len(names)
    assert {path.read_text() for path in targets} == {"kept"}

    # A link instead of a file is replaced. A link instead of a folder ends the run.
    if name == "files":
        assert [code for code, _ in ends] == [0, 0], ends
        return
    assert [code for code, _ in ends] == [2, 2], ends
    assert f"run/{name}, a link to {precious / '0'}" in ends[planted_on][1], ends
