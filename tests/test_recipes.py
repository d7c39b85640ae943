"""Each recipe runs: the commands of its page in order, with its unchanged file and the rows of the page.

A tiny model of the same architecture replaces the recipe's model from the hub.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import patience
import pytest
from hub_folders import build, save
from test_docs import commands
from tiers import cases
from tiny_tokenizers import bpe_folder, with_post_processor

from shardtrain import cli

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "configs/recipes").glob("*.toml"))
# With this size, keys and values have 64 features, as many as the rank of the adapters.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 128,
}
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2-135M": ("llama2", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "Llama-3.2-1B": ("llama3-tied", WIDE),
    "Qwen3-0.6B": ("qwen3", {}),
    "Qwen3-1.7B": ("qwen3", {"num_hidden_layers": 3}),
    "Qwen2.5-0.5B": ("qwen2", {}),
    "Mistral-7B-v0.1": ("mistral", WIDE),
}
"""For each model of the hub, its family in tests/hub_folders.py and other fields of its config.json."""
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BEFORE = {"smollm2_dpo": "smollm2_sft"}
"""Recipes that start from the result of another recipe."""
SMALL = "--nproc 1 --training.device cpu --metrics.log_freq 1"
LENGTHS = {"llama32_qlora": 192}
"""Sequence length of recipes whose prompts exceed 64 tokens: Alpaca's prompt is longer in bytes."""
FIRST = ["llama32_lora", "qwen25_classification"]


def page_of(recipe: str) -> Path:
    return ROOT / f"configs/recipes/{recipe}.md"


def lines_of(recipe: str) -> list[str]:
    return [line for _, line in commands([page_of(recipe)])]


def rows_of(recipe: str) -> list[str]:
    """Return the rows that the page shows."""
    blocks = re.findall(r"^```json\n(.*?)^```", page_of(recipe).read_text(), flags=re.M | re.S)
    assert len(blocks) == 1, "a page must show its rows once"
    return blocks[0].splitlines()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_recipe_names_the_first_command_of_its_page(file: Path) -> None:
    first_lines = re.findall(r"^# First: (.*)$", file.read_text(), flags=re.M)
    if file.stem in BEFORE:
        assert f"configs/recipes/{BEFORE[file.stem]}.md" in first_lines[0]
    else:
        assert first_lines == [line for line in lines_of(file.stem) if "data download" in line]


def models_of(content: dict[str, Any]) -> list[str]:
    """Return the folders of models that a recipe names."""
    models = [content["model"]["hf_assets_path"]]
    teacher = content.get("task", {}).get("teacher_path")
    return [*models, teacher] if teacher else models


def prepare(folder: Path, recipe: str) -> dict[str, Any]:
    """Create the models and data files that a recipe needs. Return the content of the recipe."""
    (folder / "data").mkdir(exist_ok=True)
    if not (folder / "configs").exists():
        (folder / "configs").symlink_to(ROOT / "configs")
    content = tomllib.loads((ROOT / f"configs/recipes/{recipe}.toml").read_text())
    for assets in (folder / path for path in models_of(content) if not (folder / path).exists()):
        family, fields = FOLDERS["SmolLM2-135M" if recipe in BEFORE else assets.name]
        save(build(family, vocab_size=352, **fields), assets)
        bpe_folder(
            assets, SPECIAL, bos_token="<s>", eos_token="</s>", chat_template=_template(assets.name)
        )
        with_post_processor(
            assets, "llama3" if assets.name.startswith(("Llama", "Mistral")) else "gpt2"
        )
    count = (
        1
        + content["training"].get("global_batch_size", content["training"]["local_batch_size"]) // 2
    )
    text = (ROOT / f"configs/recipes/{recipe}.toml").read_text() + "\n".join(lines_of(recipe))
    for name in re.findall(r"\bdata/[\w.]+", text):
        repeats = 2 if re.search("held_out|test", name) else count
        (folder / name).write_text("\n".join(rows_of(recipe) * repeats) + "\n")
    return content


def _template(name: str) -> str | None:
    """Return the chat template of a published tokenizer: Qwen's have one, those of base models do not."""
    return (ROOT / "configs/recipes/chatml.jinja").read_text() if name.startswith("Qwen") else None


def run(folder: Path, line: str) -> None:
    """Run a command of a page in a forked process with ``folder`` as its working directory."""
    output = folder / "output.txt"
    if not line.startswith("shardtrain "):
        subprocess.run(["bash", "-c", line], cwd=folder, check=True, timeout=patience.seconds(60))
        return

    def child() -> None:
        os.chdir(folder)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w")
        code = cli.main(shlex.split(line)[1:])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(patience.seconds(300))
    assert process.exitcode == 0, (
        f"`{line}` ended with {process.exitcode}\n{output.read_text()[-4000:]}"
    )


def run_page(folder: Path, recipe: str) -> None:
    """Run the commands of a recipe's page. Options make its training runs small."""
    content = prepare(folder, recipe)
    length = LENGTHS.get(recipe, 64)
    small = f"{SMALL} --training.seq_len {length}"
    if "validation" in content:
        small += f" --validation.seq_len {length}"
    for line in lines_of(recipe):
        if line.startswith("shardtrain data download"):  # ``prepare`` has already created the model
            assert any(f"/{Path(path).name} " in line for path in models_of(content))
        elif line.startswith("pip install"):  # tests must not install packages
            continue
        else:
            run(folder, f"{line} {small}" if line.startswith("shardtrain train") else line)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "recipe", cases(FIRST, nightly=[file.stem for file in FILES if file.stem not in FIRST])
)
def test_commands_of_a_recipe_page_run(tmp_path: Path, recipe: str) -> None:
    if recipe.endswith("qlora"):
        pytest.importorskip("torchao")
    if recipe in BEFORE:
        run_page(tmp_path, BEFORE[recipe])
    run_page(tmp_path, recipe)
    content = tomllib.loads((ROOT / f"configs/recipes/{recipe}.toml").read_text())
    folder = tmp_path / content["job"]["dump_folder"]

    assert json.loads((folder / "exit.json").read_text())["code"] == 0

    if (adapter := tmp_path / f"outputs/{recipe}_peft").exists():
        adapter_config = json.loads((adapter / "adapter_config.json").read_text())
        assert adapter_config["base_model_name_or_path"] == content["model"]["hf_assets_path"]
    losses = [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]

    assert losses, "a random model of 352 tokens has a loss near 6"
    for loss in losses:
        assert 0 < loss < 20, "a random model of 352 tokens has a loss near 6"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_recipe_passes_config_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    prepare(tmp_path, file.stem)
    monkeypatch.chdir(tmp_path)
    code = cli.main(["config", "check", f"configs/recipes/{file.name}", "--for-machine", "none"])
    output = capsys.readouterr()

    assert code == 0, output.err
    assert "0 errors" in output.out


def test_each_recipe_has_a_page_and_each_page_a_recipe() -> None:
    pages = {file.stem for file in (ROOT / "configs/recipes").glob("*.md")} - {"README"}
    assert pages == {file.stem for file in FILES} >= set(FIRST)
    table = (ROOT / "configs/recipes/README.md").read_text()
    for name in pages:
        assert f"({name}.md)" in table
        assert f"({name}.toml)" in table
        text = page_of(name).read_text()
        headings = re.findall(r"^## (.*)$", text, flags=re.M)
        assert headings == [
            "Data",
            "Commands",
            "Memory and time",
            "What to look at",
            "What goes wrong",
        ]
        assert len(rows_of(name)) == 2
        assert f"$ shardtrain train configs/recipes/{name}.toml" in text
