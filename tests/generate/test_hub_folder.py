"""Text from a Hugging Face folder: the tokens of ``transformers.generate``, for every family and on several ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from hub_folders import build, save
from ranks import run_ranks
from tiny_tokenizers import bpe_folder

from shardtrain.cli import main
from shardtrain.errors import ConfigError
from shardtrain.generate.engine import Generator
from shardtrain.generate.opening import open_model
from shardtrain.parallel.world import World

transformers = pytest.importorskip("transformers")

FAMILIES = ["llama3", "mistral", "qwen2", "neox", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3"]
PROMPTS = [[5, 7, 11, 13, 17], [3, 200, 41]]
NEW = 8
CHAT = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"


def ours(folder: Path, here: World | None = None, ids: int = 260) -> list[list[int]]:
    opened = open_model(folder, here=here, tokenizer_path="bytes")
    return Generator(opened.model, opened.layout, ids, width=opened.width).generate(PROMPTS, NEW)


def theirs(model: Any, prompt: list[int]) -> list[int]:
    found = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_the_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = build(family)
    assert ours(save(model, tmp_path / "hf")) == [theirs(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "phi"])
def test_the_tokens_of_an_architecture_that_only_transformers_has_are_its_own(name: str) -> None:
    """Ends that are one tensor among them, whose head is no module of its own."""
    model = transformers.AutoModelForCausalLM.from_pretrained(foreign.folder(name), dtype=torch.float32).eval()
    assert ours(foreign.folder(name), ids=512) == [theirs(model, prompt) for prompt in PROMPTS]
    with pytest.raises(ConfigError, match="holds a T5ForConditionalGeneration, which does not continue a text"):
        ours(foreign.folder("t5"))


def on_rank(rank: int, folder: Path) -> list[list[int]]:
    return ours(folder, World(rank, 2, rank, torch.device("cpu")))


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_layers_split_over_ranks_give_the_same_tokens(family: str, tmp_path: Path) -> None:
    folder = save(build(family), tmp_path / "hf", shard_bytes=20_000)
    alone = ours(folder)
    assert run_ranks(2, on_rank, folder) == [alone, alone]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = save(build("llama3", vocab_size=400), tmp_path_factory.mktemp("text") / "hf")
    bpe_folder(found, eos_token="</s>", bos_token="<s>", chat_template=CHAT)
    return found


def test_the_command_uses_tokenizer_and_chat_template_of_the_folder(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "--from", str(folder), "--prompt", "the cat", "--max_new_tokens", "4"]
    assert main(words) == 0
    plain = capfd.readouterr().out
    assert main([*words, "--chat"]) == 0
    assert capfd.readouterr().out != plain


def test_what_is_missing_or_of_no_effect_is_said(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = save(build("llama3"), tmp_path / "bare")
    cases = [
        ([str(bare)], "has no tokenizer (tokenizer.json, tokenizer.model, vocab.json, ...); name one with --tokenizer"),
        ([str(folder), "--config", "x.toml"], "has no effect"),
        ([str(tmp_path), "--tokenizer", "bytes"], "is for a Hugging Face folder"),
    ]
    capfd.readouterr()
    for words, told in cases:
        assert main(["generate", "--prompt", "a", "--from", *words]) == 2
        error = capfd.readouterr().err
        assert told in error and error.count("\n") == 1, error
    assert (
        main(["generate", "--prompt", "a", "--from", str(bare), "--tokenizer", "bytes", "--max_new_tokens", "2"]) == 0
    )
