"""Each recipe runs: its file as it stands, its page's commands in their order, on rows that the page shows.

A recipe's folder of the hub is a tiny one of the same architecture, at the place that the file names.
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
WIDE = {"hidden_size": 128, "intermediate_size": 128}  # keys and values of 64, the rank of the recipes' adapters
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2-135M": ("llama2", {"tie_word_embeddings": True, "num_key_value_heads": 2}),
    "Llama-3.2-1B": ("llama3-tied", WIDE),
    "Qwen3-0.6B": ("qwen3", {}),
    "Qwen3-1.7B": ("qwen3", {"num_hidden_layers": 3}),
    "Qwen2.5-0.5B": ("qwen2", {}),
    "Mistral-7B-v0.1": ("mistral", WIDE),
}
"""Name of a folder of the hub -> the family of tests/hub_folders.py, and what else is set in its config.json."""
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BEFORE = {"smollm2_dpo": "smollm2_sft"}
"""Recipes that start from what another one makes."""
SMALL = "--nproc 1 --training.device cpu --metrics.log_freq 1"
LENGTHS = {"llama32_qlora": 192}
"""Tokens of a row, where 64 would cut off what is learned: Alpaca's prompt alone is longer, byte by byte."""
FIRST = ["llama32_lora", "qwen25_classification"]


def page_of(recipe: str) -> Path:
    return ROOT / f"configs/recipes/{recipe}.md"


def lines_of(recipe: str) -> list[str]:
    return [line for _, line in commands([page_of(recipe)])]


def rows_of(recipe: str) -> list[str]:
    """The rows that the page shows."""
    found = re.findall(r"^```json\n(.*?)^```", page_of(recipe).read_text(), flags=re.M | re.S)
    assert len(found) == 1, "a page shows its rows once"
    return found[0].splitlines()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_says_which_command_of_its_page_comes_first(file: Path) -> None:
    said = re.findall(r"^# First: (.*)$", file.read_text(), flags=re.M)
    before = BEFORE.get(file.stem)
    assert said == [line for line in lines_of(file.stem) if "data download" in line] or (
        before is not None and f"configs/recipes/{before}.md" in said[0]
    )


def models_of(content: dict[str, Any]) -> list[str]:
    """The folders of the hub that a recipe names."""
    teacher = content.get("task", {}).get("teacher_path")
    return [content["model"]["hf_assets_path"], *([teacher] if teacher else [])]


def prepare(folder: Path, recipe: str) -> dict[str, Any]:
    """A working directory with what the recipe names: a model of the hub, and files of the rows of its page."""
    (folder / "data").mkdir(exist_ok=True)
    if not (folder / "configs").exists():
        (folder / "configs").symlink_to(ROOT / "configs")
    content = tomllib.loads((ROOT / f"configs/recipes/{recipe}.toml").read_text())
    for assets in (folder / path for path in models_of(content) if not (folder / path).exists()):
        family, fields = FOLDERS["SmolLM2-135M" if recipe in BEFORE else assets.name]
        save(build(family, vocab_size=352, **fields), assets)
        bpe_folder(assets, SPECIAL, bos_token="<s>", eos_token="</s>", chat_template=_template(assets.name))
        with_post_processor(assets, "llama3" if assets.name.startswith(("Llama", "Mistral")) else "gpt2")
    count = 1 + content["training"].get("global_batch_size", content["training"]["local_batch_size"]) // 2
    for name in re.findall(
        r"\bdata/[\w.]+", (ROOT / f"configs/recipes/{recipe}.toml").read_text() + "\n".join(lines_of(recipe))
    ):
        repeats = 2 if re.search("held_out|test", name) else count
        (folder / name).write_text("\n".join(rows_of(recipe) * repeats) + "\n")
    return content


def _template(name: str) -> str | None:
    """What a published tokenizer says of conversations: Qwen's have a template, base models none."""
    return (ROOT / "configs/recipes/chatml.jinja").read_text() if name.startswith("Qwen") else None


def run(folder: Path, line: str) -> None:
    """A command of a page, in a forked process with ``folder`` as its working directory."""
    output = folder / "output.txt"
    if not line.startswith("shardtrain "):
        subprocess.run(["bash", "-c", line], cwd=folder, check=True, timeout=patience.seconds(60))
        return

    def child() -> None:
        os.chdir(folder)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        code = cli.main(shlex.split(line)[1:])
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(patience.seconds(300))
    assert process.exitcode == 0, f"`{line}` gave {process.exitcode}\n{output.read_text()[-4000:]}"


def run_page(folder: Path, recipe: str) -> None:
    content = prepare(folder, recipe)
    for line in lines_of(recipe):
        if line.startswith("shardtrain data download"):  # stood in for by prepare
            assert any(f"/{Path(path).name} " in line for path in models_of(content))
        elif line.startswith("pip install"):  # tests do not change the environment that they run in
            continue
        else:
            length = LENGTHS.get(recipe, 64)
            small = f" {SMALL} --training.seq_len {length}"
            small += f" --validation.seq_len {length}" if "validation" in content else ""
            run(folder, line + small if line.startswith("shardtrain train") else line)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("recipe", cases(FIRST, nightly=[file.stem for file in FILES if file.stem not in FIRST]))
def test_a_recipe_runs_as_its_page_says(tmp_path: Path, recipe: str) -> None:
    if recipe.endswith("qlora"):
        pytest.importorskip("torchao")
    if recipe in BEFORE:
        run_page(tmp_path, BEFORE[recipe])
    run_page(tmp_path, recipe)
    content = tomllib.loads((ROOT / f"configs/recipes/{recipe}.toml").read_text())
    folder = tmp_path / content["job"]["dump_folder"]
    assert json.loads((folder / "exit.json").read_text())["code"] == 0
    if (adapter := tmp_path / f"outputs/{recipe}_peft").exists():
        told = json.loads((adapter / "adapter_config.json").read_text())
        assert told["base_model_name_or_path"] == content["model"]["hf_assets_path"]
    losses = [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert losses and all(0 < loss < 20 for loss in losses), "a random model of 352 tokens has a loss near 6"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_passes_the_check_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: Path
) -> None:
    prepare(tmp_path, file.stem)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["config", "check", f"configs/recipes/{file.name}", "--for-machine", "none"]) == 0, (
        capsys.readouterr().err
    )
    assert "0 errors" in capsys.readouterr().out


def test_each_recipe_has_a_page_and_each_page_a_recipe() -> None:
    pages = {file.stem for file in (ROOT / "configs/recipes").glob("*.md")} - {"README"}
    assert pages == {file.stem for file in FILES} >= set(FIRST)
    table = (ROOT / "configs/recipes/README.md").read_text()
    for name in pages:
        assert f"({name}.md)" in table and f"({name}.toml)" in table
        text = page_of(name).read_text()
        headings = re.findall(r"^## (.*)$", text, flags=re.M)
        assert headings == ["Data", "Commands", "Memory and time", "What to look at", "What goes wrong"]
        assert len(rows_of(name)) == 2 and f"$ shardtrain train configs/recipes/{name}.toml" in text
