"""``init`` writes a file for ``train``: the preset and the given overrides, explained line by line."""

from __future__ import annotations

import json
import shlex
import tomllib
from pathlib import Path

import pytest

from shardtrain import cli, config
from shardtrain.config import init_file, load, presets


@pytest.mark.parametrize("preset", presets.names())
def test_the_file_is_the_configuration_of_the_preset(preset: str, tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.toml"
    assert cli.main(["init", str(path), preset, "--training.steps", "77"]) == 0

    written = config.load(path, [])
    meant = config.load(presets.FOLDER / f"{preset}.toml", ["--training.steps", "77"])
    assert written.config == meant.config

    lines = path.read_text().splitlines()
    assert max(map(len, lines)) <= 120

    # Each option has a comment line, except for those with a dotted name.
    for number, line in enumerate(lines):
        if " = " in line and not line.startswith("#"):
            assert lines[number - 1].startswith("#") or "." in line.partition(" = ")[0], line

    for option in init_file.FIRST:
        name = option.rpartition(".")[2]
        assert any(name in line for line in lines)


def test_given_options_are_written_and_the_next_commands_printed(
    tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["--training.dataset", "text", "--training.dataset_path", "a.txt"]
    assert cli.main(["init", "mine.toml", *options]) == 0

    table = tomllib.loads(Path("mine.toml").read_text())
    assert table["training"]["dataset_path"] == "a.txt"
    assert table["model"]["flavor"] == "2.6M"
    assert "shardtrain train mine.toml" in capsys.readouterr().out

    # The file is valid as soon as its data exists.
    Path("a.txt").write_text("words " * 400_000)
    assert cli.main(["config", "check", "mine.toml"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs the file to write"),
        (["run"], "does not end in .toml"),
        (["there.toml"], "exists"),
        (["new.toml", "llama3_9b"], "llama3_9b"),
        (["new.toml", "--training.stepz", "1"], "training.steps"),
    ],
)
def test_a_wrong_argument_is_one_line_and_writes_nothing(
    arguments, message, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.toml").write_text("")
    assert cli.main(["init", *arguments]) == 2

    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["there.toml"]


def test_an_existing_schema_is_kept_if_equal_or_replaced_with_a_note(
    tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    schema = Path("shardtrain.schema.json")
    assert cli.main(["init", "first.toml"]) == 0

    # An identical schema is not rewritten, so its modification time is unchanged.
    written = schema.read_text()
    stamp = schema.stat()
    assert "replaced" not in capsys.readouterr().err
    assert cli.main(["init", "second.toml"]) == 0
    assert schema.stat() == stamp
    assert "replaced" not in capsys.readouterr().err

    schema.write_text("{}")
    assert cli.main(["init", "third.toml"]) == 0

    note = "note: replaced shardtrain.schema.json, which was not the schema of this version\n"
    assert schema.read_text() == written
    assert capsys.readouterr().err == note


def test_an_interactive_user_is_prompted(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    # An empty answer accepts the default, here that of the third question.
    answers = iter(["llama3_8b", "corpus/*.jsonl", "", "500"])

    assert init_file.main([str(tmp_path / "a.toml")], lambda question: next(answers)) == 0

    written_config = config.load(tmp_path / "a.toml", []).config
    training = written_config.training
    assert (training.dataset, training.dataset_path) == ("jsonl", "corpus/*.jsonl")
    assert training.steps == 500
    assert written_config.model.flavor == "8B"
    assert not list(answers)


def test_the_next_commands_can_be_pasted_for_any_file_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["init", "my run's.toml", "debug"]) == 0

    commands = [
        shlex.split(line)
        for line in capsys.readouterr().out.splitlines()
        if line.startswith("  shardtrain ")
    ]

    assert len(commands) == 3
    assert all(command[-1] == "my run's.toml" for command in commands)


def write_model_folder(folder: Path, **config: object) -> str:
    """Write the parts of a Hugging Face folder that ``init`` reads: config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


TINY_QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 4096, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
TINY_GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4,
    "vocab_size": 300,
}  # fmt: skip


HF_ASSETS = ["--model.hf_assets_path", "FOLDER"]
INITIAL_LOAD = ["--checkpoint.initial_load_path", "FOLDER", "--checkpoint.initial_load_in_hf"]


@pytest.mark.parametrize(
    ("config", "options", "name"),
    [
        (TINY_QWEN, HF_ASSETS, "qwen2"),
        (TINY_QWEN, INITIAL_LOAD, "qwen2"),
        (TINY_QWEN, [*HF_ASSETS, "--model.name", "transformers"], "transformers"),
        (TINY_GPT2, HF_ASSETS, "transformers"),
    ],
)
def test_a_hugging_face_folder_replaces_the_model_of_the_preset(
    config, options, name, tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_model_folder(tmp_path / "folder", **config)
    arguments = [folder if option == "FOLDER" else option for option in options]

    assert cli.main(["init", "tuned.toml", "debug", *arguments]) == 0

    table = tomllib.loads(Path("tuned.toml").read_text())
    assert table["model"] == {"name": name, "flavor": "from_folder", "hf_assets_path": folder}
    # The prompt and the description of the preset do not fit another model, so init removes them.
    assert "sample_prompt" not in table["metrics"]
    assert "description" not in table["job"]

    model = load("tuned.toml").config.model
    assert model.name == name
    assert name == "transformers" or model.overrides["dim"] == 64


def test_a_named_flavor_and_a_folder_with_only_a_tokenizer_keep_the_model(
    tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_model_folder(tmp_path / "folder", **TINY_QWEN)
    options = [
        "--model.hf_assets_path",
        folder,
        "--model.flavor",
        "debugmodel",
        "--metrics.sample_prompt",
        "Once",
    ]

    assert cli.main(["init", "named.toml", "debug", *options]) == 0

    named = tomllib.loads(Path("named.toml").read_text())
    assert named["model"]["name"] == "llama3"
    assert named["metrics"]["sample_prompt"] == "Once"

    # A folder without config.json has no model to use.
    (tmp_path / "tokenizer").mkdir()
    assert cli.main(["init", "tokenizer.toml", "debug", "--model.hf_assets_path", "tokenizer"]) == 0
    tokenizer_table = tomllib.loads(Path("tokenizer.toml").read_text())
    assert tokenizer_table["model"]["flavor"] == "2.6M"


def test_a_folder_that_describes_another_model_than_named_is_an_error(
    tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_model_folder(tmp_path / "folder", **TINY_QWEN)
    assert (
        cli.main(["init", "a.toml", "--model.hf_assets_path", folder, "--model.name", "llama3"])
        == 2
    )
    assert "qwen2" in capsys.readouterr().err
    assert not Path("a.toml").exists()
