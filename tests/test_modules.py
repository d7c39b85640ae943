"""No silent success: running a module without a program fails, and unused options and variables are reported."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_origin

import patience
import pytest

from shardtrain import cli, config
from shardtrain.config.options import options
from shardtrain.utils import as_module
from shardtrain.utils.errors import ConfigError

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "shardtrain"
FILES = sorted(PACKAGE.rglob("*.py"))


def is_program(tree: ast.Module) -> bool:
    """True if the file ends with an ``if __name__`` block."""
    last = tree.body[-1]
    return isinstance(last, ast.If) and "__name__" in ast.dump(last.test) and bool(last.body)


def test_each_module_run_by_python_does_something_or_fails(capsys):
    """Modules that are not programs must fail: `python -m shardtrain.train.validation` did nothing, with status 0."""
    modules = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES}
    num_refused = 0
    for path, name in modules.items():
        if path.name == "__init__.py":
            name = name.removesuffix(".__init__")
            works = name == "shardtrain" or (path.parent / "__main__.py").exists()
        else:
            works = is_program(ast.parse(path.read_text()))
        if works:
            as_module.refuse_without_program(["python", "-m", name, "--from", "runs/a"])
            continue

        with pytest.raises(SystemExit) as ended:
            as_module.refuse_without_program(["python", "-m", name, "--from", "runs/a"])

        message = capsys.readouterr().err
        assert ended.value.code == 2
        assert message.count("\n") == 1
        assert name in message

        num_refused += 1

    assert num_refused > 200


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("NGPU", "RANK", "CONFIG_FILE")
    }
    environment = {**inherited, "PYTHONPATH": str(ROOT), **variables}
    limit = patience.seconds(60)
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)


@pytest.mark.parametrize(
    "arguments",
    [
        ["-m", "shardtrain.train.validation", "--from", "runs/a"],
        ["-um", "shardtrain.tools.generate"],
        ["-mshardtrain.launch.platforms.runai"],
    ],
)
def test_python_refuses_to_run_a_module_without_a_program(arguments):
    done = python(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error[2]: python -m shardtrain.")


def test_train_py_at_the_root_runs_the_train_verb(tmp_path):
    """Scripts of torchtrain and early torchtitan run `torchrun ... train.py --job.config_file X`."""
    done = python(str(ROOT / "train.py"), "--job.config_file", str(tmp_path / "none.toml"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "does not exist" in done.stderr


def test_config_file_variable_applies_without_a_configuration_on_the_command_line(
    tmp_path, monkeypatch, capsys
):
    """torchtitan's scripts use this variable, and `runai submit -e CONFIG_FILE=...` sets it in an image."""
    for name, text in (("of_variable", "stepz = 1"), ("of_command_line", "stepy = 1")):
        (tmp_path / f"{name}.toml").write_text(f"[training]\n{text}\n")
    monkeypatch.setenv("CONFIG_FILE", str(tmp_path / "of_variable.toml"))
    for verb in (["train"], ["test"], ["config", "show"], ["config", "check"]):
        assert cli.main(verb) == 2
        output = "".join(capsys.readouterr())
        assert "stepz" in output
        assert "from CONFIG_FILE" in output

        # A configuration on the command line replaces that of the variable.
        path = str(tmp_path / "of_command_line.toml")
        for arguments in ([path], ["--job.config_file", path], [f"--job.config-file={path}"]):
            assert cli.main([*verb, *arguments]) == 2
            output = "".join(capsys.readouterr())
            assert "stepy" in output
            assert "CONFIG_FILE" not in output

    # The value of the variable is printed without escape sequences.
    monkeypatch.setenv("CONFIG_FILE", str(tmp_path / "gone\x1b[31m.toml"))
    assert cli.main(["train"]) == 2

    message = capsys.readouterr().err
    assert "does not exist" in message
    assert "\x1b" not in message


def unread() -> list[str]:
    """Return the options that no file outside ``config`` names, as an attribute or in a string."""
    names: set[str] = set()
    for path in FILES:
        if path.parent.name != "config":
            nodes = list(ast.walk(ast.parse(path.read_text())))
            names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            names |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    return [
        name for name in options() if name.rpartition(".")[2] not in names and name not in names
    ]


def another(kind: Any, default: Any) -> str:
    """Return a value of an option's type other than its default."""
    args = [arg for arg in get_args(kind) if arg is not type(None)]
    if kind is bool or bool in args:
        return str(not default).lower()
    literals = [arg for arg in args if isinstance(arg, str)]
    if literals:
        return next(literal for literal in literals if literal != default)
    number_type = next((arg for arg in (kind, *args) if arg in (int, float)), None)
    if number_type and get_origin(kind) is not list:
        return str(number_type((default or 1) + 1))
    return "other"


def test_option_without_effect_is_reported(tmp_path):
    """An option must not be accepted and silently ignored."""
    names = unread()
    assert 5 < len(names) < 60
    for name in names:
        option = options()[name]
        value = another(option.kind, option.default)
        try:
            loaded = config.load(None, [f"--{name}", value])
        except ConfigError as error:
            assert name in str(error), name
            continue
        lines = [
            *map(str, config.check(loaded)),
            *map(str, config.unavailable(loaded)),
            *config.notes(loaded),
        ]

        assert any(name in line for line in lines), (
            f"{name}={value} has no effect, and no message reports it"
        )
