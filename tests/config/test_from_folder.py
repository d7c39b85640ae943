"""``model.flavor = "from_folder"``, or no flavor, uses the sizes of config.json."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import patience
import pytest

from shardtrain.config import check, load
from shardtrain.utils.errors import ConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96,
    "rope_theta": 500000.0, "my_key": 1,
}  # fmt: skip
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "hf", LLAMA)


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def at(folder: Path, *arguments: str) -> Any:
    return load(None, ["--model.hf_assets_path", str(folder), *arguments])


@pytest.mark.parametrize(
    "arguments", [(), ("--model.flavor", "from_folder"), ("--model.name", "llama2")]
)
def test_the_folder_determines_the_sizes(arguments: tuple[str, ...], folder: Path) -> None:
    loaded = at(folder, *arguments)
    model = loaded.config.model
    assert model.name in ("llama2", "llama3")
    assert model.overrides["dim"] == 64
    assert model.overrides["num_layers"] == 2
    assert model.overrides["ffn_dim"] == 96
    assert model.overrides["vocab_size"] == 512
    assert loaded.origins["model.overrides.dim"] == f"{folder}/config.json"
    assert loaded.origins["model.flavor"] == f"{folder}/config.json"

    assert any("with the sizes of" in notice for notice in loaded.notices)
    assert any("my_key is not used by LlamaForCausalLM" in notice for notice in loaded.notices)
    assert not [problem for problem in check(loaded) if "model" in str(problem)]


def test_a_folder_used_for_sizes_may_have_another_tokenizer(folder: Path, tmp_path: Path) -> None:
    arguments = ("--model.tokenizer_path", "bytes")
    assert not [
        problem
        for problem in check(at(folder, *arguments))
        if "model.hf_assets_path" in str(problem)
    ]

    (tmp_path / "empty").mkdir()
    problems = [str(problem) for problem in check(at(tmp_path / "empty", *arguments))]
    assert any("has no effect with model.tokenizer_path" in line for line in problems)


def test_options_of_the_user_override_the_folder(folder: Path) -> None:
    loaded = at(folder, "--model.overrides.num_layers", "1")
    assert loaded.config.model.overrides["num_layers"] == 1
    assert loaded.config.model.overrides["dim"] == 64
    assert loaded.origins["model.overrides.num_layers"] == "command line"

    named = at(folder, "--model.flavor", "debugmodel").config.model
    assert (named.name, named.flavor, dict(named.overrides)) == ("llama3", "debugmodel", {})


def test_an_unsupported_architecture_uses_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path / "gpt2", GPT2)
    for arguments in ((), ("--model.flavor", "from_folder"), ("--model.name", "transformers")):
        loaded = at(folder, *arguments)
        assert loaded.config.model.name == "transformers"
        assert loaded.config.model.overrides == {"path": str(folder)}

    assert "model_type='gpt2' is not one of" in at(folder).notices[0]


def test_a_folder_with_only_a_tokenizer_keeps_the_default(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    assert at(tmp_path).config.model.flavor == "debugmodel"
    assert load(None, []).config.model.flavor == "debugmodel"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--model.flavor", "from_folder", "--model.hf_assets_path", "nowhere"),
            "which does not exist; fetch it (shardtrain data download",
        ),
        (
            ("--model.flavor", "from_folder", "--model.hf_assets_path", "bytes"),
            "which has no config.json; name a",
        ),
        (
            ("--model.flavor", "from_folder", "--model.hf_assets_path", "/"),
            "which has no config.json",
        ),
        (
            ("--model.flavor", "from_folder", "--model.name", "qwen3"),
            'which is llama3; set it to "llama3"',
        ),
        (("--model.flavor", "from_folder", "--model.name", "mine.py"), "is a model file of yours"),
    ],
)
def test_an_impossible_folder_is_one_problem(
    arguments: tuple[str, ...], message: str, folder: Path
) -> None:
    with pytest.raises(ConfigError) as raised:
        load(
            None,
            ["--model.hf_assets_path", str(folder), *arguments]
            if "--model.hf_assets_path" not in arguments
            else [*arguments],
        )
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_folder_that_describes_nothing_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path / "hf", {**LLAMA, "hidden_size": "wide"})
    with pytest.raises(
        ConfigError,
        match="set model.flavor if the folder only contains a tokenizer.*hidden_size='wide' must be a int",
    ):
        at(folder)


def test_an_unknown_architecture_is_named_immediately(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = write(tmp_path / "hf", {**LLAMA, "model_type": "gpt9"})
    with pytest.raises(
        ConfigError, match="model_type 'gpt9', which neither this package nor transformers has"
    ):
        at(folder)


def test_no_torch_is_imported_for_it(folder: Path) -> None:
    code = (
        "import sys; from shardtrain.config import load; "
        f"load(None, ['--model.hf_assets_path', {str(folder)!r}]); print('torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        check=True,
    )

    assert result.stdout.strip() == "False"
