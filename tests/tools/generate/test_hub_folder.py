"""Generation from a Hugging Face folder equals ``transformers.generate`` for every family and on several ranks."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import foreign
import pytest
import torch
from hub_folders import build, save
from ranks import run_ranks
from tiny_tokenizers import bpe_folder, with_post_processor

from shardtrain.cli import main
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.distributed.process_group import World
from shardtrain.tools.generate.engine import Generator
from shardtrain.tools.generate.prompts import GenerationPrompts
from shardtrain.tools.generate.trained_model import OpenedModel, open_model
from shardtrain.utils.errors import ConfigError

transformers = pytest.importorskip("transformers")

FAMILIES = [
    "llama3",
    "mistral",
    "qwen2",
    "neox",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "deepseek_v2",
    "llama4",
    "gpt_oss",
]
PROMPTS = [[5, 7, 11, 13, 17], [3, 200, 41]]
NEW = 8
CHAT = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>{% endif %}"


def ours(folder: Path, here: World | None = None, ids: int = 260) -> list[list[int]]:
    opened = open_model(folder, world=here, tokenizer_path="bytes")
    return Generator(opened.model, opened.layout, ids, width=opened.width).generate(PROMPTS, NEW)


def theirs(model: Any, prompt: list[int]) -> list[int]:
    generated = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = generated[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_from_a_folder_equal_those_of_transformers(family: str, tmp_path: Path) -> None:
    model = build(family)
    assert ours(save(model, tmp_path / "hf")) == [theirs(model, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "phi"])
def test_tokens_of_architectures_without_a_native_model_equal_those_of_transformers(
    name: str,
) -> None:
    """The architectures include one with tied embeddings, in which the head is not a separate module."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        foreign.folder(name), dtype=torch.float32
    ).eval()
    assert ours(foreign.folder(name), ids=512) == [theirs(model, prompt) for prompt in PROMPTS]
    with pytest.raises(
        ConfigError, match="contains a T5ForConditionalGeneration, which cannot continue a text"
    ):
        ours(foreign.folder("t5"))


def on_rank(rank: int, folder: Path) -> list[list[int]]:
    return ours(folder, World(rank, 2, rank, torch.device("cpu")))


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
@pytest.mark.nightly(
    "of other folders",
    by="tests/tools/generate/test_generate_command.py::test_tensor_parallel_ranks_generate_the_tokens_of_one_rank",
)
def test_layers_split_over_ranks_generate_the_same_tokens(family: str, tmp_path: Path) -> None:
    folder = save(build(family), tmp_path / "hf", shard_bytes=20_000)
    single_rank = ours(folder)
    assert run_ranks(2, on_rank, folder) == [single_rank, single_rank]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = save(build("llama3", vocab_size=400), tmp_path_factory.mktemp("text") / "hf")
    bpe_folder(path, eos_token="</s>", bos_token="<s>", chat_template=CHAT)
    return path


def test_the_command_uses_tokenizer_and_chat_template_of_the_folder(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--from", str(folder), "--prompt", "the cat", "--max_new_tokens", "4"]
    assert main(arguments) == 0
    plain = capfd.readouterr().out
    assert main([*arguments, "--chat"]) == 0
    assert capfd.readouterr().out != plain


STYLES = {"llama3": "llama3", "neox": "gpt2", "llama3-tied": "gpt2"}
"""Families with the style of their tokenizer: Llama 3, Pythia, SmolLM2."""
QUESTIONS = ["the cat sat", "Hello! How", "def main"]


def test_rows_equal_those_of_transformers_with_and_without_bos(tmp_path: Path) -> None:
    equal = 0
    for (family, style), chat in itertools.product(STYLES.items(), (False, True)):
        place = tmp_path / f"{family}-{chat}"
        with_post_processor(
            bpe_folder(place, eos_token="</s>", bos_token="<s>", chat_template=CHAT), style
        )
        # Build no unused vocabulary rows, because transformers may generate their ids, but we never do.
        save(build(family, vocab_size=open_tokenizer(str(place)).vocab_size), place)
        (tmp_path / "in.jsonl").write_text(
            "".join(json.dumps({"prompt": text}) + "\n" for text in QUESTIONS)
        )
        out = tmp_path / f"{family}-{chat}.jsonl"
        arguments = [
            "generate",
            "--from",
            str(place),
            "--input",
            str(tmp_path / "in.jsonl"),
            "--output",
            str(out),
        ]
        assert main([*arguments, "--max_new_tokens", str(NEW), *(["--chat"] if chat else [])]) == 0

        model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        tokenizer = transformers.AutoTokenizer.from_pretrained(place)
        for text, line in zip(QUESTIONS, out.read_text().splitlines(), strict=True):
            if chat:
                messages = [{"role": "user", "content": text}]
                prompt = tokenizer.apply_chat_template(
                    messages, add_generation_prompt=True, return_dict=True
                )
            else:
                prompt = tokenizer(text)
            ids = torch.tensor([prompt.input_ids])
            # With --chat, a row also ends at the end of a turn in the template, which transformers ignores.
            ends = [
                model.generation_config.eos_token_id,
                *([tokenizer.eos_token_id] if chat else []),
            ]
            generated = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=ends)
            expected = tokenizer.decode(generated[0, ids.size(1) :], skip_special_tokens=True)

            assert json.loads(line)["prediction"] == expected, (family, chat, text)

            equal += 1

    assert equal == 18


MISSING = object()
END = "</s>"


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Return a model folder whose continuation of the prompt has an end token late, and the ids before it."""
    folder = bpe_folder(tmp_path_factory.mktemp("ends") / "hf", eos_token=END, bos_token="<s>")
    tokenizer = open_tokenizer(str(folder))
    prompt = torch.tensor([tokenizer.encode("the cat").tolist()])
    for seed in range(20):
        model = build("llama3", seed, vocab_size=tokenizer.vocab_size)
        text = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)[
            0, prompt.size(1) :
        ]
        head = model.lm_head.weight.data
        head[tokenizer.eos_id] = 1.5 * head[text[-1]]
        ends = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": tokenizer.eos_id}
        ids: list[int] = model.generate(prompt, **ends)[0, prompt.size(1) :].tolist()
        if ids[-1] == tokenizer.eos_id and len(set(ids)) > 5:
            return save(model, folder), ids
    raise AssertionError("no seed yields a model whose text ends")


@pytest.mark.parametrize("in_generation", ["no file", MISSING, None, "one", "several"])
@pytest.mark.parametrize("in_config", [MISSING, None, "one", "several"])
def test_a_text_ends_where_transformers_ends_it(
    in_config: Any,
    in_generation: Any,
    chatty: tuple[Path, list[int]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    source, ids = chatty
    folder = shutil.copytree(source, tmp_path / "hf")
    # Use ids of the generated text as end tokens. That of config.json occurs before that of generation_config.json.
    first, second, third = list(dict.fromkeys(ids))[1:4]
    for name, kind, named in (
        ("config.json", in_config, {"one": second, "several": [first, 3]}),
        ("generation_config.json", in_generation, {"one": third, "several": [4, second]}),
    ):
        values = json.loads((folder / name).read_text())
        del values["eos_token_id"]
        if kind == "no file":
            (folder / name).unlink()
            continue
        if kind is not MISSING:
            values["eos_token_id"] = None if kind is None else named[kind]
        (folder / name).write_text(json.dumps(values))

    capfd.readouterr()
    assert (
        main(["generate", "--from", str(folder), "--prompt", "the cat", "--max_new_tokens", "20"])
        == 0
    )

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # If no file names an end token, transformers never stops, but we stop at the tokenizer's.
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    prompt = tokenizer("the cat", return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=20, do_sample=False, eos_token_id=ends)
    new = generated[0, prompt.input_ids.size(1) :]

    assert len(new) < 20
    assert capfd.readouterr().out == tokenizer.decode(new, skip_special_tokens=True) + "\n"


def test_settings_that_are_not_used_are_named(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    copy = shutil.copytree(folder, tmp_path / "hf")
    settings = {
        "do_sample": True, "temperature": 0.6, "top_p": 0.9, "suppress_tokens": [5], "forced_bos_token_id": 7,
        "max_length": 10, "num_beams": 1, "bos_token_id": 0, "pad_token_id": 0, "transformers_version": "5.0",
    }  # fmt: skip
    (copy / "generation_config.json").write_text(json.dumps(settings))
    capfd.readouterr()
    assert (
        main(["generate", "--from", str(copy), "--prompt", "the cat", "--max_new_tokens", "2"]) == 0
    )

    named = "do_sample=True, forced_bos_token_id=7, max_length=10, suppress_tokens=[5], temperature=0.6, top_p=0.9"
    assert f"ignored generation settings of the model: {named}; set" in capfd.readouterr().err
    for content in ("[]", "{", '{"eos_token_id": "a"}', '{"eos_token_id": [1.5]}'):
        (copy / "generation_config.json").write_text(content)
        assert (
            main(["generate", "--from", str(copy), "--prompt", "the cat", "--max_new_tokens", "2"])
            == 5
        )
        assert "generation_config.json" in capfd.readouterr().err


def test_add_bos_overrides_the_tokenizer_of_a_folder(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    opened = open_model(folder)

    def prompt_ids(model: OpenedModel) -> list[int]:
        prompts = GenerationPrompts(model.tokenizer, model.config.data, None)
        return prompts.value("the cat", "--prompt")

    plain = prompt_ids(opened)
    with_bos = prompt_ids(opened.with_data(add_bos=True))

    assert with_bos == [opened.tokenizer.bos_id, *plain]

    arguments = ["generate", "--from", str(folder), "--prompt", "the cat", "--max_new_tokens", "4"]
    assert main([*arguments, "--add_bos", "true"]) == 0
    for more, message in (
        (["--add_bos", "true", "--chat"], "--add_bos=true has no effect with --chat"),
        (["--add_bos", "yes"], "'yes' is neither true nor false"),
    ):
        capfd.readouterr()
        assert main([*arguments, *more]) == 2
        error = capfd.readouterr().err
        assert message in error, error
        assert error.count("\n") == 1, error


def test_missing_and_ineffective_options_are_reported(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    bare = save(build("llama3"), tmp_path / "bare")
    cases = [
        (
            [str(bare)],
            "has no tokenizer (tokenizer.json, tokenizer.model, vocab.json, ...); add --tokenizer with a path or",
        ),
        ([str(folder), "--config", "x.toml"], "has no effect"),
        ([str(tmp_path), "--tokenizer", "bytes"], "is only for Hugging Face folders"),
    ]
    capfd.readouterr()
    generate = ["generate", "--prompt", "a", "--from"]
    for arguments, message in cases:
        assert main([*generate, *arguments]) == 2
        error = capfd.readouterr().err
        assert message in error
        assert error.count("\n") == 1, error

    # The option suggested by the first error fixes it.
    assert main([*generate, str(bare), "--tokenizer", "bytes", "--max_new_tokens", "2"]) == 0
