"""The command line: help, errors and exit statuses of each verb, without importing torch."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import forked
import patience
import pytest

from shardtrain import __version__, cli
from shardtrain.config import command_line, presets
from shardtrain.config.load import load
from shardtrain.config.options import options
from shardtrain.launch import environment
from shardtrain.tools.data import data_command
from shardtrain.train import preflight

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("*.toml"))
ONE_STEP = [
    "--training.steps=1",
    "--training.seq_len=32",
    "--training.local_batch_size=1",
    "--training.device=cpu",
]
TINY = [
    "--model.hf_assets_path=bytes", "--model.overrides.num_layers=1", "--lr_scheduler.warmup_steps=1",
    "--metrics.enable_tensorboard=false",
]  # fmt: skip


def answer(capsys, *arguments):
    """Run the command line in this process. Return the exit status, the output and the errors."""
    code = cli.main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def shell(*arguments, **environment):
    """Run the command line in a forked process."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LOG_RANK", "NGPU", "RANK")
    }
    return forked.run(
        [sys.executable, "-m", "shardtrain", *arguments],
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
        env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


@pytest.mark.parametrize("arguments", [("help",), ("--help",), ("-h",)])
def test_help_lists_the_verbs(capsys, arguments):
    code, out, err = answer(capsys, *arguments)
    assert (code, err) == (0, "")
    for verb in ("train", "config show", "config check", "config help", "data", "--version"):
        assert verb in out


@pytest.mark.parametrize(
    "verb", [verb for verb in cli.VERBS if not verb.startswith("-") and verb != "help"]
)
def test_help_of_each_verb_has_an_example(capsys, verb):
    try:
        code = cli.main([verb, "--help"])
    except SystemExit as end:  # argparse exits after it prints help
        code = end.code
    out, err = capsys.readouterr()

    assert (code, err) == (0, "")
    assert out.startswith(f"usage: shardtrain {verb}")

    examples = re.findall(
        rf"^(?:example: |  )(?:eval \"\$\()?(shardtrain {verb}\b.+)", out, flags=re.MULTILINE
    )

    assert examples, out
    assert all(len(line) <= 120 for line in out.splitlines())


def test_options_and_presets_in_the_help_of_train_exist(capsys):
    assert cli.main(["train", "--help"]) == 0

    out = capsys.readouterr().out
    option_names = set(re.findall(r"--([a-z_]+\.[a-z_]+)", out))
    assert len(option_names) >= 10
    assert option_names <= {*options(), "section.key"}
    assert all(
        presets.find(Path(name)).exists()
        for name in re.findall(r"shardtrain train (llama\w+)", out)
    )
    assert re.split(r",\s+", out.partition("\nPresets:\n")[2].strip()) == presets.names()


@pytest.mark.parametrize("arguments", [("data", "--help"), ("data", "-h"), ("data", "help")])
def test_help_of_data_lists_its_verbs(capsys, arguments):
    code, out, err = answer(capsys, *arguments)
    assert (code, err) == (0, "")
    for verb in data_command.VERBS:
        assert f"\n  {verb}" in out


def test_verbs_of_data_are_the_modules_with_a_main():
    folder = ROOT / "shardtrain" / "tools" / "data"
    with_main = {
        file.stem
        for file in folder.glob("*.py")
        if "\ndef main(arguments: list[str]) -> int:" in file.read_text()
    }

    assert with_main == {*data_command.VERBS, "data_command"}


def test_verb_of_data_receives_its_arguments_and_returns_the_status(capsys, monkeypatch):
    tool = types.ModuleType("shardtrain.tools.data.check")
    tool.main = lambda arguments: print(arguments) or 3
    monkeypatch.setitem(sys.modules, tool.__name__, tool)
    assert answer(capsys, "data", "check", "a.toml", "--json") == (3, "['a.toml', '--json']\n", "")


@pytest.mark.parametrize("verb", data_command.VERBS)
def test_each_verb_of_data_has_help_and_imports_torch_only_if_needed(verb):
    imports_in_vain = "'torch' in sys.modules" if not data_command.VERBS[verb].needs_torch else "0"
    program = f"""
import sys
from shardtrain import cli
assert cli.main(['data', {verb!r}, '--help']) == 0
sys.exit({imports_in_vain})
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        env=environment,
        check=False,
    )

    assert done.returncode == 0, done.stderr or "torch was imported"
    assert f"shardtrain data {verb}" in done.stdout


def test_version_is_that_of_the_package(capsys):
    assert answer(capsys, "--version") == (0, f"shardtrain {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ((), ["shardtrain needs a verb", "train, plan,", "shardtrain --help"]),
        (("data",), ["shardtrain data needs a verb", "prepare, check,", "shardtrain data --help"]),
        (
            ("checkpoint",),
            ["shardtrain checkpoint needs a verb", "ls, verify,", "shardtrain checkpoint --help"],
        ),
        (("launch",), ["shardtrain launch requires a platform", "local, ssh"]),
        (("data", "tokenizer"), ["shardtrain data tokenizer requires an action", "train"]),
        (("replay",), ["STEP is not set", "120 or 100:120"]),
        (("tain",), ["tain", "is not a verb", "did you mean train?"]),
        (
            ("data", "prepar"),
            ["shardtrain data", "prepar", "is not a verb", "did you mean prepare?"],
        ),
        (
            ("data", "frobnicate"),
            ["frobnicate", "verbs are prepare, check, show, probe, tokenizer, download"],
        ),
        (("data", "--training.steps", "3"), ["--training.steps", "is not a verb"]),
        (("config",), ["needs a verb", "show, check, help, schema, migrate"]),
        (("config", "shwo"), ["shwo", "did you mean show?"]),
        (("config", "help", "training.stps"), ["training.stps", "option"]),
        (("train", "--nproc"), ["--nproc", "has no value", "--nproc 2"]),
        (("train", "--nproc", "0"), ["--nproc", "above 0"]),
        (("train", "--nproc=two"), ["--nproc", "two"]),
        (("train", "--training.stps", "3"), ["training.stps", "did you mean training.steps"]),
        (("train", "no_such_file.toml"), ["no_such_file.toml"]),
        (("config", "show", "--training.steps", "many"), ["training.steps", "many"]),
    ],
)
def test_wrong_command_prints_one_line_and_exits_with_2(capsys, arguments, fragments):
    code, out, err = answer(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error[2]: ")
    assert err.count("\n") == 1
    for fragment in fragments:
        assert fragment in err


def test_all_problems_are_reported_together_before_any_process_starts(capsys):
    arguments = ["train", "--training.steps", "0", "--parallelism.tensor_parallel_degree", "3"]
    arguments += ["--validation.enable", "--training.device", "cpu"]
    code, out, err = answer(capsys, *arguments)

    assert (code, out) == (2, "")

    lines = err.splitlines()
    assert all(line.startswith("error[2]: ") for line in lines)
    for problem in (
        "training.steps=0",
        "tensor_parallel_degree=3 does not divide the 8 attention heads",
        'validation.dataset="" is not set',
    ):
        assert any(problem in line for line in lines)
    (validation,) = [line for line in lines if 'validation.dataset="" is not set' in line]
    assert "name a dataset" in validation


def test_show_prints_each_option_with_its_origin(capsys):
    code, out, _ = answer(
        capsys, "config", "show", str(ROOT / "configs/debug.toml"), "--training.steps", "7"
    )

    assert code == 0
    assert "steps = 7  # command line" in out
    assert "seed = 42  # default" in out
    assert any(line.startswith("seq_len = 256  # debug.toml:") for line in out.splitlines())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_of_the_repository_passes_the_check(capsys, name):
    code, out, _ = answer(
        capsys, "config", "check", str(ROOT / "configs" / name), "--for-machine", "none"
    )

    assert code == 0, out
    assert "0 errors" in out


def test_config_check_with_errors_exits_with_2(capsys):
    code, out, _ = answer(capsys, "config", "check", "--training.steps", "0")
    assert code == 2
    assert "training.steps=0" in out


def test_config_check_with_nproc_checks_the_mesh(capsys):
    arguments = ("config", "check", "--parallelism.tensor_parallel_degree", "2")
    assert answer(capsys, *arguments)[0] == 0
    assert answer(capsys, *arguments, "--nproc", "3")[0] == 2


def test_help_explains_one_option(capsys):
    code, out, _ = answer(capsys, "config", "help", "training.steps")
    assert code == 0
    assert "Optimizer steps of the run." in out


def test_file_may_follow_nproc_and_later_values_belong_to_overrides():
    split = command_line.split(["--nproc", "3", "run.toml", "--a.b", "x", "y", "--c.d=1"])
    assert split == command_line.CommandLine("run.toml", 3, ("--a.b", "x", "y", "--c.d=1"))
    assert command_line.split(["--a.b", "x.toml"]).path is None


def test_help_of_verbs_does_not_import_torch():
    verbs = [verb for verb in cli.VERBS if not verb.startswith("-") and verb != "help"]
    program = "import sys\nfrom shardtrain import cli\n"
    program += f"for verb in {verbs!r}:\n    assert cli.main([verb, '--help']) == 0\n"
    program += "    assert not {'torch', 'transformers', 'pandas'} & set(sys.modules), verb\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["config", "show"],
        ["config", "check"],
        ["train", "--training.steps", "0"],
    ],
)
def test_only_a_real_run_imports_torch(arguments):
    program = f"import sys; from shardtrain import cli; cli.main({arguments!r}); sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )

    assert done.returncode == 0, done.stderr


@pytest.mark.nightly(
    "two ranks of the script",
    by="tests/launch/test_entry_point.py::test_the_script_trains_with_two_ranks_in_an_empty_environment",
)
def test_the_default_run_trains_with_two_processes(tmp_path):
    arguments = ["--training.steps=2", *ONE_STEP[1:], *TINY, "--job.dump_folder", str(tmp_path)]
    done = shell("train", *arguments, NGPU="2")
    assert done.returncode == 0, done.stderr
    assert "training with 2 processes (from NGPU)" in done.stderr
    assert "step:  1  loss:" in done.stderr
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 2
    assert '"code": 0' in (tmp_path / "exit.json").read_text()


def test_one_process_needs_no_launcher(tmp_path):
    arguments = ["train", *ONE_STEP, *TINY, "--nproc", "1", "--job.dump_folder", str(tmp_path)]
    # run_train.sh sets this variable. It names the command that activates the environment.
    done = shell(*arguments, SHARDTRAIN_ACTIVATE="source here/bin/activate")

    assert done.returncode == 0, done.stderr
    assert "training with 1 process (from --nproc)" in done.stderr
    assert "step:  1  loss:" in done.stderr
    assert "no configuration is named: this is the preset debug" in done.stderr

    suggestions = done.stderr.splitlines()[-4:]
    assert [line[6:].split(" --")[0] for line in suggestions] == [
        "source here/bin/activate", f"shardtrain generate {tmp_path}", "shardtrain train",
        f"shardtrain report {tmp_path}",
    ], suggestions  # fmt: skip
    assert suggestions[0].startswith("next: ")
    assert suggestions[2].endswith("--training.steps=2")
    assert "a sample" in done.stderr


@pytest.mark.filterwarnings("ignore:'shardtrain.train' found in sys.modules")  # by the tests
def test_train_module_runs_the_train_verb(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--training.stepz", "3"])
    # The command exits immediately if background threads are left, such as those of the test runner.
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.main_thread()])

    with pytest.raises(SystemExit) as ended:
        runpy.run_module("shardtrain.train", run_name="__main__")
    assert ended.value.code == 2
    assert "training.stepz" in capsys.readouterr().err


@pytest.mark.nightly(
    "ranks of torchrun",
    by="tests/launch/test_requests_to_stop.py::test_ranks_save_when_the_signal_kills_torchrun",
)
@pytest.mark.parametrize(
    "module", [["shardtrain", "train"], ["shardtrain.train"]]
)  # and as in torchtitan
def test_torchrun_starts_the_same_command(tmp_path, module):
    arguments = [*ONE_STEP, *TINY, "--job.dump_folder", str(tmp_path)]
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--rdzv-backend=c10d",
    ]
    done = subprocess.run(
        [*torchrun, "--rdzv-endpoint=127.0.0.1:0", "-m", *module, *arguments],
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        },
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stderr.count("step:  1  loss:") == 1
    assert '"code": 0' in (tmp_path / "exit.json").read_text()


@pytest.mark.nightly(
    "a faster test uses ranks without training",
    by="tests/launch/test_local.py::test_a_rank_killed_by_a_signal_is_named_with_the_signal",
)
@pytest.mark.skipif(sys.platform != "linux", reason="finds the ranks in /proc")
def test_killed_rank_of_a_real_run_is_named_and_stops_the_run(tmp_path):
    arguments = [
        "--training.steps=100000",
        "--training.on_data_end=repeat",
        *ONE_STEP[1:],
        *TINY,
        "--nproc=2",
        f"--job.dump_folder={tmp_path}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOG_RANK": "0"}
    process = forked.Popen(
        [sys.executable, "-m", "shardtrain", "train", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "step: 20" in line:
                break
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        # Kill rank 1, the second child of the launcher.
        os.kill(int(children[1]), signal.SIGKILL)
        _, rest = process.communicate(timeout=patience.seconds(60))
    finally:
        process.kill()

    assert process.returncode == 6, lines

    messages = [line for line in rest.splitlines() if not line[:4].isdigit()]
    assert len(messages) == 1, "there are other lines, such as a traceback"
    assert messages[0].startswith("error[6]: rank 1 (host ")
    assert "was killed by signal 9" in messages[0]

    record = json.loads((tmp_path / "exit.json").read_text())
    assert (record["code"], record["rank"], record["retryable"]) == (6, 1, True)
    assert record["last_step"] >= 20
    assert not Path(f"/proc/{children[0]}").exists()


@pytest.mark.parametrize(
    "command_line",
    [
        "config show {}", "config check {}", "config migrate {} -o new.toml", "train {}", "plan {}",
        "verify {}", "init {}.toml", "import {} --to new", "export {} --to new", "merge {} --to new",
        "data check {}", "data show {}", "checkpoint ls {}", "checkpoint verify {}",
        "evaluate --from {} --data a=b", "generate --from {} --prompt a", "goodput {}", "report {}",
        "profile {}", "watch {}", "runs {}", "replay 3 {}", "test {}", "doctor {}",
        "launch ssh {} --hosts a",
    ],
)  # fmt: skip
def test_a_path_that_is_too_long_is_refused_in_one_line(
    capsys, tmp_path, monkeypatch, command_line
):
    """``Path.exists`` of Python 3.11 raises OSError for a path with a name of more than 255 bytes."""
    monkeypatch.chdir(tmp_path)
    code, _, err = answer(capsys, *command_line.format("n" * 300).split())
    assert code in (2, 3, 5)
    assert err.startswith(f"error[{code}]: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "verb", ["generate", "evaluate", "export", "import", "merge", "report", "watch", "profile"]
)
def test_help_lists_at_most_ten_common_options_first(capsys, verb):
    assert cli.main([verb, "--help"]) == 0
    common = capsys.readouterr().out.partition("options that few need:")[0]
    option_names = re.findall(r"^  (?:-\w(?: \w+)?, )?--(\w+)", common, flags=re.MULTILINE)
    assert 1 <= len(set(option_names) - {"help"}) <= 10


@pytest.mark.parametrize(("nproc", "threads"), [(1, 8), (2, 4), (8, 1)])
def test_ranks_share_the_cores_before_torch_counts_them(monkeypatch, tmp_path, nproc, threads):
    """torch reads OMP_NUM_THREADS on import. Ranks that all use every core would wait for each other's threads."""
    monkeypatch.setattr(sys.modules["torch"], "set_num_threads", lambda number: None)

    class ImportsTorchError(Exception):
        pass

    def trainer():
        raise ImportsTorchError(os.environ.get("OMP_NUM_THREADS"))

    monkeypatch.setattr(os, "environ", {**os.environ, "SHARDTRAIN_HEARTBEAT_SECONDS": "0"})
    monkeypatch.delitem(os.environ, "OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(environment, "usable_cores", lambda: 8)
    monkeypatch.setattr(environment, "count_accelerators", lambda device: 0)
    # called in this process for one rank
    monkeypatch.setattr(preflight, "require", lambda *arguments: trainer())
    monkeypatch.setattr(cli, "_trainer", trainer)

    with pytest.raises(ImportsTorchError, match=rf"^{threads}$"):
        cli._train(["debug", "--nproc", str(nproc), "--job.dump_folder", str(tmp_path)])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_the_closing_sample_only_ends_the_sample(
    monkeypatch, capsys, tmp_path, number
):
    """The run is complete and saved before the sample, so its exit status must remain 0."""
    monkeypatch.setattr(
        "shardtrain.tools.generate.generate_command.main",
        lambda arguments: signal.raise_signal(number),
    )
    cli._show_sample(load("debug", [f"--job.dump_folder={tmp_path}", "--checkpoint.enable"]))

    assert "stopped by a signal" in capsys.readouterr().err
    # a second signal must not change the status either
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


def test_suggested_downloads_name_existing_kinds_of_files():
    """Each suggested download must say what is needed: the default fetches only the tokenizer."""
    lines = []
    for path in (ROOT / "shardtrain").rglob("*.py"):
        for line in path.read_text().splitlines():
            if "data download --repo_id" in line:
                lines.append((path, line))
    assert len(lines) > 5

    for path, line in lines:
        if "--all" in line:
            continue
        assets = re.search(r"--assets ((?:\w+ ?)+)", line)
        assert assets, (path, line)
        assert set(assets[1].split()) <= {"tokenizer", "config", "index", "safetensors"}, (
            path,
            line,
        )


@pytest.mark.parametrize("phase", ["importing", "running"])
def test_ctrl_c_prints_no_traceback(tmp_path, phase):
    """Python's default prints the stack of the import or call that Ctrl-C interrupted."""
    interrupt = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    if phase == "running":
        interrupt = f"def main(*_):\n    {interrupt.replace(chr(10), chr(10) + '    ')}"
    program = f"""
import importlib.abc, importlib.util, runpy, sys
class Interrupting(importlib.abc.Loader):
    def exec_module(self, module):
        exec({interrupt!r}, module.__dict__)
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {"shardtrain.config" if phase == "importing" else "shardtrain.launch.launch_command"!r}:
            return importlib.util.spec_from_loader(name, Interrupting())
sys.meta_path.insert(0, Finder())
sys.argv = ["shardtrain", "launch", "slurm", "debug"]
runpy.run_module("shardtrain", run_name="__main__", alter_sys=True)
"""
    command = [sys.executable, "-c", program]
    # A background job of a shell ignores SIGINT.
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=patience.seconds(60), preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip

    assert done.returncode == -signal.SIGINT
    assert done.stderr == ("" if phase == "importing" else "stopped by SIGINT\n")
