"""A secret in the value of an unknown option is never printed, for all verbs and all sources of options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardtrain import load_config
from shardtrain.cli import main
from shardtrain.utils.errors import ConfigError, Problem

HEX = "0123456789abcdef0123456789abcdef01234567"
BASE64 = "wJalrXUtnFEMIK7MDENG/bPxRfiCYzzCANARY99x"
SECRETS = {
    "training.password": "hunter22",
    "api_key": "hunter22",
    "hub-token": "hunter22",
    "wandb.key": "hunter22",
    "clientSecret": "hunter22",
    "credential": "12345678",
    "authorization": "hunter22",
    "wandb_key": HEX,
    "training.stepz": HEX,
    "id": BASE64,
    "x.a": "hf_Canary0123456789Canary",
    "x.b": "sk-Canary0123456789Canary0123456789",
    "x.c": "AKIACANARY0123456789",
    "x.d": "https://me:hunter22@host/x",
    "x.e": "eyJhbGciOiJIUzI1NiJ9Canary0123456789",
}
NO_SECRETS = {
    "max_token": "512",
    "eos_token": "</s>",
    "training.pad_token": "<|pad-1|>",
    "training.stepz": "300",
    "authors": "me",
    "tokenizer_file": "models/Llama-3.1-8B-Instruct/tokenizer.json",
    "data_folder": "/mnt/Data2/projects/OpenThoughts114kFiltered/part",
    "model.revison_sha": HEX,
}
VERBS = (
    "config check", "config show", "train debug", "test debug", "plan", "verify", "doctor", "data check",
    "launch local debug", "replay 1", "init new.toml debug", "checkpoint ls", "generate --from x --prompt y", "runs",
    "evaluate --from x", "report x", "watch", "export x --to y", "import x --to y", "merge x --to y", "goodput",
    "profile x", "config migrate x.json",
)  # fmt: skip


def canary(secret: str) -> str:
    return "hunter22" if "hunter22" in secret else secret


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_prints_the_secret_of_an_unknown_option(verb, capfd, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    for arguments in (["--password=hunter22"], ["--password", "hunter22"], ["--x", HEX]):
        assert main([*verb.split(), *arguments]) == 2
        printed = "".join(capfd.readouterr())
        assert "hunter22" not in printed, printed
        assert HEX not in printed, printed


def reports(name: str, value: str, folder: Path) -> list[str]:
    """Return the messages about an unknown option on the command line, in TOML, and in a dict in Python."""
    toml = folder / "a.toml"
    toml.write_text(f"{json.dumps(name) if '.' not in name else name} = {json.dumps(value)}\n")
    messages = []
    for arguments in ((None, [f"--{name}", value]), (toml, []), (None, {name: value})):
        path, options = arguments
        with pytest.raises(ConfigError) as error:
            if isinstance(options, dict):
                load_config("debug", options)
            else:
                from shardtrain import config

                config.load(path, options)
        messages.append(str(error.value))
    return messages


@pytest.mark.parametrize("name", SECRETS)
def test_secret_of_an_unknown_option_is_never_printed(name, capfd, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    value = SECRETS[name]
    for message in reports(name, value, tmp_path):
        assert canary(value) not in message, message
        assert "***" in message or "is not a section" in message, message

    for file in ("trainer.json", "deepspeed.json"):
        arguments = {"learning_rate": 1e-5, "output_dir": "x", "per_device_train_batch_size": 1}
        deepspeed = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}}
        Path(file).write_text(
            json.dumps({**(deepspeed if "deep" in file else arguments), name: value})
        )
        main(["config", "migrate", file, "-o", f"{file}.toml"])
        printed = "".join(capfd.readouterr())

        assert canary(value) not in printed, printed
        assert "***" in printed, printed


@pytest.mark.parametrize("name", NO_SECRETS)
def test_other_values_are_printed(name, tmp_path) -> None:
    for message in reports(name, NO_SECRETS[name], tmp_path):
        assert NO_SECRETS[name] in message


def test_a_masked_value_is_masked_in_the_rule_and_the_fix() -> None:
    problem = Problem("config", HEX, f"has {HEX}", f"write {HEX} first")
    assert str(problem) == 'config="***" has ***; write *** first'


def test_values_inside_tables_and_lists_are_masked() -> None:
    problem = Problem("x", {"password": "hunter22", "n": [1, HEX]}, "is a section", "remove it")
    assert str(problem) == "x={'password': '***', 'n': [1, '***']} is a section; remove it"
