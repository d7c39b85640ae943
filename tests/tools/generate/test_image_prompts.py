"""Generation with images equals ``transformers.generate``. An invalid image ends in one error line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from image_runs import open_processor
from PIL import Image
from tiers import cases
from vision_folders import IMAGE, NAMES, png, vision_folder

from shardtrain import cli
from shardtrain.tools.generate.engine import Generator
from shardtrain.tools.generate.image_prompts import ImagePrompts
from shardtrain.tools.generate.trained_model import open_model

transformers = pytest.importorskip("transformers")
NUM_NEW = 12


def images_in(folder: Path, count: int) -> list[str]:
    paths = []
    for number in range(count):
        path = folder / f"{number}.png"
        path.write_bytes(png(number))
        paths.append(str(path))
    return paths


def tokens_of_transformers(name: str, text: str, paths: list[str]) -> list[int]:
    folder = vision_folder(name)
    processor = open_processor(folder)
    images = [Image.open(path) for path in paths]
    inputs = processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    network = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    tokens = network.generate(**inputs, max_new_tokens=NUM_NEW, do_sample=False, eos_token_id=-1)
    return tokens[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


def our_tokens(name: str, prompt: str, paths: list[str], chat: bool) -> list[int]:
    opened = open_model(vision_folder(name), dtype="float32", may_read_images=True)
    prompts = ImagePrompts(opened.config, opened.tokenizer, paths)
    ids, images = prompts.encode(prompt, chat)
    generator = Generator(opened.model, opened.layout)
    return generator.generate([ids], NUM_NEW, images=images)[0]


@pytest.mark.parametrize("name", cases(["llava", "qwen2_5_vl"], nightly=list(NAMES)))
def test_greedy_tokens_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Two images, one of them in the middle of a user's message."""
    paths = images_in(tmp_path, 2)
    image = IMAGE[name]
    text = f"<s>user\n{image}a cat {image}?</s><s>assistant\n"
    expected = tokens_of_transformers(name, text, paths)

    assert our_tokens(name, "<image>a cat <image>?", paths, chat=True) == expected
    assert our_tokens(name, text, paths, chat=False) == expected


def test_images_precede_a_prompt_without_places(tmp_path: Path) -> None:
    paths = images_in(tmp_path, 2)
    text = "<s>user\n<image><image>a cat?</s><s>assistant\n"
    assert our_tokens("llava", "a cat?", paths, chat=True) == tokens_of_transformers(
        "llava", text, paths
    )


def test_the_command_prints_the_text(tmp_path: Path, capfd: Any) -> None:
    folder = str(vision_folder("llava"))
    (path,) = images_in(tmp_path, 1)
    arguments = ["generate", folder, "--prompt", "a cat?", "--chat", "--image", path]
    assert cli.main([*arguments, "--dtype", "float32", "--max_new_tokens", str(NUM_NEW)]) == 0

    new = our_tokens("llava", "a cat?", [path], chat=True)
    tokenizer = open_model(vision_folder("llava"), may_read_images=True).tokenizer
    if 1 in new:
        new = new[: new.index(1)]

    assert capfd.readouterr().out.strip() == tokenizer.decode(new).strip()


def truncated(folder: Path) -> str:
    path = folder / "cut.png"
    path.write_bytes(png(0)[:-200])
    return str(path)


@pytest.mark.parametrize(
    ("image", "options", "code", "message"),
    [
        ("0.png", [], 2, "has 0 places for 1 images; write <image> in the prompt for each image"),
        ("0.png", ["--chat", "--image", "1.png"], 2, "has 2 places for 3 images"),
        ("cut.png", ["--chat"], 3, "cut.png cannot be decoded"),
        ("none.png", ["--chat"], 2, 'none.png" is not a file; name the file of an image'),
        ("https://example.com/a.png", [], 2, "is a URL, and images are never downloaded"),
        ("0.png", ["--nproc", "2"], 2, "--nproc=2 is not supported with --image"),
    ],
)
def test_wrong_images_are_one_line(
    image: str,
    options: list[str],
    code: int,
    message: str,
    tmp_path: Path,
    monkeypatch: Any,
    capfd: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    images_in(tmp_path, 2)
    truncated(tmp_path)
    prompt = "a <image> cat <image>" if "1.png" in options else "a cat"
    folder = str(vision_folder("llava"))
    arguments = ["generate", folder, "--prompt", prompt, "--image", image, *options]
    if "1.png" in options:
        arguments += ["--image", "0.png"]
    assert cli.main(arguments) == code

    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error")]
    assert len(lines) == 1
    assert message in lines[0]


def test_an_image_for_a_text_model_is_refused(tmp_path: Path, capfd: Any) -> None:
    folder = tmp_path / "model"
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=260,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    (path,) = images_in(tmp_path, 1)
    arguments = ["generate", str(folder), "--tokenizer", "bytes", "--prompt", "a", "--image", path]
    assert cli.main(arguments) == 2
    assert "requires a model that reads images" in capfd.readouterr().err
