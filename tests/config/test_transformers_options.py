"""Options of a network of ``transformers`` that cannot take effect are refused before anything is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import patience
import pytest

from shardtrain import config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    fields = {
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    (path / "config.json").write_text(json.dumps(fields))
    return path


def problems(folder: Path | str, *arguments: str) -> str:
    loaded = config.load(
        None, ["--model.name", "transformers", "--model.hf_assets_path", str(folder), *arguments]
    )
    return "\n".join(map(str, config.check(loaded)))


def test_the_folder_of_the_tokenizer_is_that_of_the_model(folder: Path) -> None:
    loaded = config.load(
        None, ["--model.name", "transformers", "--model.hf_assets_path", str(folder)]
    )

    assert loaded.config.model.overrides == {"path": str(folder)}
    assert config.load(None, []).config.model.overrides == {}
    assert problems(folder) == ""


@pytest.mark.parametrize(
    ("arguments", "option", "message"),
    [
        (
            ["--parallelism.tensor_parallel_degree=4"],
            "parallelism.tensor_parallel_degree=4",
            "num_key_value_heads=2",
        ),
        (
            ["--model.overrides.attention=flash"],
            'model.overrides.attention="flash"',
            "use auto, sdpa, eager",
        ),
        (["--optimizer.name=Muon"], "optimizer.muon_adamw_patterns", "names no parameter"),
        (["--model.overrides.rows=4"], "model.overrides.rows=4", "is not a field"),
        (
            ["--model.overrides.dropout=true", "--parallelism.tensor_parallel_degree=2"],
            "model.overrides.dropout=true",
            "ranks would drop other numbers",
        ),
        (
            ["--model.overrides.dropout=true", "--parallelism.context_parallel_degree=2"],
            "model.overrides.dropout=true",
            "has no dropout",
        ),
        (
            ["--compile.enable", "--parallelism.tensor_parallel_degree=2"],
            "compile.enable=true",
            "gets gradients wrong",
        ),
        (
            ["--compile.enable", "--parallelism.expert_parallel_degree=2"],
            "compile.enable=true",
            "with experts that are split over ranks",
        ),
    ],
)
def test_unsupported_options_of_transformers_models_are_rejected(
    arguments: list[str], option: str, message: str, folder: Path
) -> None:
    text_of_problems = problems(folder, *arguments)
    assert option in text_of_problems
    assert message in text_of_problems


def test_balance_loss_is_rejected_with_other_tasks_and_compile(folder: Path) -> None:
    compile_arguments = ["--compile.enable"]
    override = "--model.overrides.balance_loss_coeff=0.1"
    assert problems(folder, override) == ""
    assert "balance loss of experts" in problems(folder, override, *compile_arguments)

    # With output_router_logits, transformers adds the balance loss without the override.
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "output_router_logits": True}))
    assert problems(folder) == ""
    assert "balance loss of experts" in problems(folder, *compile_arguments)

    without = "--model.overrides.balance_loss_coeff=0"
    assert problems(folder, without, *compile_arguments) == ""

    text_of_problems = problems(folder, "--task.name=masked_language_model")
    assert "is not supported with task.name=masked_language_model" in text_of_problems
    assert "is not supported" not in problems(folder, without, "--task.name=masked_language_model")


def test_experts_of_a_folder_are_left_to_the_check_of_its_network(folder: Path) -> None:
    """config.json names experts differently per architecture, so this check cannot count them."""
    assert problems(folder, "--parallelism.expert_parallel_degree=2") == ""
    assert "moe_force_load_balance" in problems(folder, "--debug.moe_force_load_balance=true")


def test_padded_rows_need_no_mask(folder: Path) -> None:
    assert problems(folder, "--data.format=chat", "--data.packing=padded") == ""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json"),
        ("{", "cannot be read (JSONDecodeError)"),
        ("[]", "is not a JSON object"),
        (
            '{"auto_map": {}}',
            "which transformers does not have, and its own code is never run here",
        ),
    ],
)
def test_a_folder_without_a_model_is_named(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    text_of_problems = problems(tmp_path)

    assert "model.hf_assets_path" in text_of_problems
    assert message in text_of_problems
    assert "\n" not in text_of_problems
    assert 'model.hf_assets_path="bytes" has no config.json' in problems("bytes")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task.options.mask_fraction=2.0"], "must be between 0 and 1"),
        (["--task.options.mask_token_id=-1"], "must be the id of a token"),
        (["--task.options.masks=3"], "is not an option of masked_language_model"),
        (["--task.labels", "a", "b"], "task.labels"),
        (["--data.packing=padded"], "data.packing"),
        (
            ["--parallelism.tensor_parallel_degree=2"],
            "parallelism.tensor_parallel_degree=2 splits each layer",
        ),
    ],
)
def test_options_of_hidden_tokens_are_checked(
    arguments: list[str], message: str, folder: Path
) -> None:
    assert problems(folder, "--task.name=masked_language_model") == ""
    assert message in problems(folder, "--task.name=masked_language_model", *arguments)


def test_the_check_imports_neither_torch_nor_transformers(folder: Path) -> None:
    code = (
        "import sys; from shardtrain import config as c; "
        f"print(c.check(c.load(None, ['--model.name', 'transformers', '--model.hf_assets_path', {str(folder)!r}])), "
        "sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        check=True,
    )

    assert result.stdout.strip() == "[] []"
