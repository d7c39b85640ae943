"""Laws against a success that is none: a module that is no program, an option and a variable that nothing reads."""

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
    """Whether the file does something when it is run, and not by being imported."""
    last = tree.body[-1]
    return isinstance(last, ast.If) and "__name__" in ast.dump(last.test) and bool(last.body)


def test_each_module_run_by_python_does_something_or_fails(capsys):
    """Else `python -m shardtrain.train.validation --from RUN` would define functions and end with status 0."""
    modules = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FILES}
    refused = 0
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
        told = capsys.readouterr().err
        assert ended.value.code == 2 and told.count("\n") == 1 and name in told
        refused += 1
    assert refused > 200


def python(*words: str, **names: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("NGPU", "RANK", "CONFIG_FILE")}
    environment = {**inherited, "PYTHONPATH": str(ROOT), **names}
    limit = patience.seconds(60)
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=limit)


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "shardtrain.train.validation", "--from", "runs/a"],
        ["-um", "shardtrain.tools.generate"],
        ["-mshardtrain.launch.platforms.runai"],
    ],
)
def test_python_itself_asks_before_it_runs_a_module(words):
    done = python(*words)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.startswith("error[2]: python -m shardtrain.")


def test_the_trainer_s_file_at_the_root_is_the_verb(tmp_path):
    """`torchrun ... train.py --job.config_file X`, which torchtrain's and the first torchtitan's scripts run."""
    done = python(str(ROOT / "train.py"), "--job.config_file", str(tmp_path / "none.toml"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "does not exist" in done.stderr


def test_the_variable_names_the_configuration_where_the_command_line_names_none(tmp_path, monkeypatch, capsys):
    """As in torchtitan's scripts, and as `runai submit -e CONFIG_FILE=...` reaches an image."""
    for name, text in (("of_variable", "stepz = 1"), ("of_words", "stepy = 1")):
        (tmp_path / f"{name}.toml").write_text(f"[training]\n{text}\n")
    monkeypatch.setenv("CONFIG_FILE", str(tmp_path / "of_variable.toml"))
    for verb in (["train"], ["test"], ["config", "show"], ["config", "check"]):
        assert cli.main(verb) == 2
        told = "".join(capsys.readouterr())
        assert "stepz" in told and "as CONFIG_FILE says" in told
        named = str(tmp_path / "of_words.toml")
        for words in ([named], ["--job.config_file", named], [f"--job.config-file={named}"]):
            assert cli.main([*verb, *words]) == 2
            told = "".join(capsys.readouterr())
            assert "stepy" in told and "CONFIG_FILE" not in told
    monkeypatch.setenv("CONFIG_FILE", str(tmp_path / "gone\x1b[31m.toml"))
    assert cli.main(["train"]) == 2
    told = capsys.readouterr().err
    assert "does not exist" in told and "\x1b" not in told


def unread() -> list[str]:
    """Options whose name no file outside ``config`` says, as an attribute or in a text."""
    said: set[str] = set()
    for path in FILES:
        if path.parent.name != "config":
            nodes = list(ast.walk(ast.parse(path.read_text())))
            said |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            said |= {str(node.value) for node in nodes if isinstance(node, ast.Constant)}
    return [name for name in options() if name.rpartition(".")[2] not in said and name not in said]


def another(kind: Any, default: Any) -> str:
    """A value of an option's kind that is not its default."""
    args = [one for one in get_args(kind) if one is not type(None)]
    if kind is bool or bool in args:
        return str(not default).lower()
    texts = [one for one in args if isinstance(one, str)]
    if texts:
        return next(one for one in texts if one != default)
    number = next((one for one in (kind, *args) if one in (int, float)), None)
    if number and get_origin(kind) is not list:
        return str(number((default or 1) + 1))
    return "other"


def test_an_option_that_nothing_reads_is_reported(tmp_path):
    """One that is parsed and has no effect would be a run that is not what it says."""
    found = unread()
    assert 5 < len(found) < 60
    for name in found:
        option = options()[name]
        value = another(option.kind, option.default)
        try:
            loaded = config.load(None, [f"--{name}", value])
        except ConfigError as error:
            assert name in str(error), name
            continue
        told = [*map(str, config.check(loaded)), *map(str, config.unavailable(loaded)), *config.notes(loaded)]
        assert any(name in line for line in told), f"{name}={value} is read by nothing, and nobody says so"
