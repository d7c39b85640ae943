"""Import and export together keep every file, every value of the configuration, and each tensor bit for bit.

Only the changes of a run differ. Shared tensors may be stored under another of their names.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import folder as foreign_folder
from hub_folders import FAMILIES, build, save
from lora_runs import adapter_config, train
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny import text_file, tiny_config, train_whole
from tiny_tokenizers import bpe_folder

from shardtrain.cli import main
from shardtrain.config import Loaded
from shardtrain.hf.hub_model import recognise
from shardtrain.train.run_folder import write_resolved_config

pytest.importorskip("transformers")

BESIDE = {
    "generation_config.json": '{"temperature": 0.6, "eos_token_id": [1, 2]}',
    "special_tokens_map.json": '{"bos_token": "<s>"}',
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/tools.jinja": "{{ tools }}",
    "tokenizer.model": "pieces",
    "LICENSE": "free",
}
OWN = {
    "max_position_embeddings": 77, "eos_token_id": [257, 259], "unsloth_version": "2026.1", "my_own": {"a": [1, None]},
    "torch_dtype": "bfloat16", "dtype": None, "transformers_version": "4.40.1",
}  # fmt: skip


def published(folder: Path, extra: dict[str, Any] | None = None) -> Path:
    """Convert to a typical published folder: bfloat16 with a norm in float32, tokenizer, template, custom keys."""
    bpe_folder(folder)
    for name, text in BESIDE.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    fields = json.loads((folder / "config.json").read_text())
    fields |= OWN | (extra or {})
    fields.pop("dtype", None)
    # transformers does not save layers of multi-token prediction, and an import corrects their number to zero.
    fields.pop("num_nextn_predict_layers", None)
    (folder / "config.json").write_text(json.dumps(fields, indent=1))

    converted = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        converted[name] = tensor if name.endswith("norm.weight") else tensor.bfloat16()
    save_file(converted, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def texts(folder: Path) -> dict[str, bytes]:
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    return {
        name: data
        for name, data in files.items()
        if "safetensors" not in name and name != "config.json"
    }


def fields_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())  # type: ignore[no-any-return]


OF_BYTES = {"bos_token_id": 256}
"""Changes of config.json after training with the tokenizer "bytes". Its end token is already listed."""


def assert_same_folder(
    before: Path, after: Path, changed: dict[str, Any] | None = None, weights: bool = True
) -> None:
    assert fields_of(after) == {**fields_of(before), **(changed or {})}

    actual = texts(after)
    expected = texts(before)
    if changed is OF_BYTES:
        settings = json.loads(expected.pop("generation_config.json"))
        settings |= OF_BYTES | {"eos_token_id": [257, 1, 2]}
        assert json.loads(actual.pop("generation_config.json")) == settings
    assert actual == expected

    tensors_before = tensors(before)
    tensors_after = tensors(after)
    assert tensors_before.keys() == tensors_after.keys()
    for name, tensor in tensors_before.items():
        assert tensors_after[name].shape == tensor.shape
        assert tensors_after[name].dtype == tensor.dtype
        if weights:
            bytes_after = tensors_after[name].view(torch.uint8)
            assert torch.equal(tensor.view(torch.uint8), bytes_after)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untouched_folder_survives_a_round_trip(family: str, tmp_path: Path) -> None:
    folder = published(save(build(family, vocab_size=400), tmp_path / "hf"))
    checkpoint = str(tmp_path / "checkpoint")
    back = tmp_path / "back"

    assert main(["import", str(folder), "--to", checkpoint, "--check", "weights"]) == 0
    assert main(["export", checkpoint, "--to", str(back), "--check", "weights"]) == 0
    assert_same_folder(folder, back)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "t5"])
def test_an_untouched_folder_of_transformers_survives_a_round_trip(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    for file in foreign_folder(name).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if name == "gpt2":  # published without the prefix of the base model
        bare = {key.removeprefix("transformer."): tensor for key, tensor in tensors(folder).items()}
        save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    published(folder, {"max_position_embeddings": 64})
    checkpoint = str(tmp_path / "checkpoint")
    back = tmp_path / "back"

    assert main(["import", str(folder), "--to", checkpoint]) == 0
    assert main(["export", checkpoint, "--to", str(back), "--check", "weights"]) == 0
    assert_same_folder(folder, back)


@pytest.mark.parametrize("older", [False, True])
def test_only_the_changes_of_a_run_differ(older: bool, tmp_path: Path) -> None:
    folder = published(save(build("llama3", vocab_size=400), tmp_path / "hf"))
    # Before version 5, transformers wrote the fields of RoPE like this.
    if older:
        fields = fields_of(folder)
        rope = fields.pop("rope_parameters")
        fields["rope_theta"] = rope.pop("rope_theta")
        fields["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
        (folder / "config.json").write_text(json.dumps(fields))
    checkpoint = str(tmp_path / "checkpoint")
    grown = tmp_path / "grown"
    half = tmp_path / "half"

    arguments = ["import", str(folder), "--to", checkpoint]
    assert main([*arguments, "--vocab_size", "416", "--check", "weights"]) == 0
    assert main(["export", checkpoint, "--to", str(grown), "--check", "weights"]) == 0
    assert fields_of(grown) == {**fields_of(folder), "vocab_size": 416}

    assert main(["export", str(folder), "--to", str(half), "--dtype", "float16"]) == 0
    assert fields_of(half) == {**fields_of(folder), "torch_dtype": "float16"}
    assert {tensor.dtype for tensor in tensors(half).values()} == {torch.float16}


def run_on(folder: Path, output: Path, load: Path, in_hf: bool) -> Any:
    recognised = recognise(folder)
    config = tiny_config(
        job={"dump_folder": str(output)},
        training={"steps": 1, "seq_len": 16, "local_batch_size": 2, "dataset_path": text_file()},
        checkpoint={
            "enable": True,
            "initial_load_path": str(load),
            "initial_load_in_hf": in_hf,
            "last_save_in_hf": True,
        },
        optimizer={"lr": 1e-3},
    )
    model = dataclasses.replace(
        config.model,
        name=recognised.name,
        flavor=recognised.flavor,
        overrides=dict(recognised.overrides),
        hf_assets_path="bytes",
    )
    config = dataclasses.replace(config, model=model)
    assert run_ranks(1, train_whole, config)[0].error is None
    write_resolved_config(Loaded(config), output, 1)
    return config


def test_files_of_a_model_are_kept_through_two_runs(tmp_path: Path) -> None:
    folder = published(save(build("llama3", vocab_size=400), tmp_path / "hf"))
    run_on(folder, tmp_path / "one", folder, in_hf=True)
    first = tmp_path / "one/checkpoint"

    assert_same_folder(folder, first / "step-1-hf", OF_BYTES, weights=False)
    assert any(
        not torch.equal(t, tensors(folder)[n]) for n, t in tensors(first / "step-1-hf").items()
    )

    run_on(folder, tmp_path / "two", first / "step-1", in_hf=False)
    assert_same_folder(folder, tmp_path / "two/checkpoint/step-1-hf", OF_BYTES, weights=False)
    # The export command restores the folder from the run folder, too.
    assert (
        main(
            ["export", str(tmp_path / "two"), "--to", str(tmp_path / "back"), "--check", "weights"]
        )
        == 0
    )
    assert_same_folder(tmp_path / "two/checkpoint/step-1-hf", tmp_path / "back")


def test_files_of_a_model_are_kept_through_adapters_and_their_merge(tmp_path: Path) -> None:
    folder = published(save(build("llama3", vocab_size=400), tmp_path / "hf"))
    assert train(1, adapter_config(folder, tmp_path / "run"))[0].error is None

    merged = str(tmp_path / "merged")
    assert main(["merge", str(tmp_path / "run/checkpoint/step-4"), "--to", merged]) == 0
    assert main(["export", merged, "--to", str(tmp_path / "back"), "--check", "weights"]) == 0
    assert_same_folder(folder, tmp_path / "back", OF_BYTES, weights=False)
    assert any(
        not torch.equal(t, tensors(folder)[n]) for n, t in tensors(tmp_path / "back").items()
    )


def test_existing_files_in_the_target_are_kept(tmp_path: Path) -> None:
    folder = published(save(build("llama3", vocab_size=400), tmp_path / "hf"))
    target = tmp_path / "target"
    target.mkdir()
    (target / "README.md").write_text("mine")

    for arguments in (["export", str(folder)], ["import", str(folder)]):
        assert main([*arguments, "--to", str(target)]) == 2
        assert texts(target) == {"README.md": b"mine"}


def test_names_in_a_checkpoint_stay_inside_the_folder(tmp_path: Path) -> None:
    from shardtrain.checkpoint import manifest
    from shardtrain.hf import importing, source
    from shardtrain.utils.errors import CheckpointError

    folder = published(save(build("llama3", vocab_size=400), tmp_path / "hf"))
    importing.to_checkpoint(folder, tmp_path / "checkpoint")
    stored = manifest.read(tmp_path / "checkpoint")
    for name in (
        "../evil.jinja",
        "/etc/tokenizer.json",
        "run.py",
        ".hidden.jinja",
        "chat_templates/../../x.jinja",
    ):
        facts = {**stored.facts, source.FACT: {name: [0, 1]}}
        with pytest.raises(CheckpointError, match="is not a valid file"):
            source.of_checkpoint(tmp_path / "checkpoint", dataclasses.replace(stored, facts=facts))
    # A valid name with more bytes than the checkpoint has is refused as well.
    facts = {**stored.facts, source.FACT: {"LICENSE": [0, 2**40]}}

    with pytest.raises(CheckpointError, match="is not a valid file"):
        source.of_checkpoint(tmp_path / "checkpoint", dataclasses.replace(stored, facts=facts))


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_an_import_opens_without_its_source_folder(name: str, tmp_path: Path, capsys: Any) -> None:
    """Also for architectures without a native model: the checkpoint contains the configuration and the tokenizer."""
    folder = tmp_path / "hf"
    if name == "gpt2":
        shutil.copytree(foreign_folder(name), folder)
    else:
        save(build(name, vocab_size=512), folder)
    bpe_folder(folder)
    arguments = ["--prompt", "hello", "--max_new_tokens", "4", "--device", "cpu"]

    assert main(["generate", "--from", str(folder), *arguments]) == 0

    expected = capsys.readouterr().out
    imported = str(tmp_path / "imported")
    assert main(["import", str(folder), "--to", imported, "--check", "weights"]) == 0

    # Without the source folder, the checkpoint generates the same text.
    shutil.rmtree(folder)
    capsys.readouterr()
    assert main(["generate", "--from", imported, *arguments]) == 0
    assert capsys.readouterr().out == expected

    # An export writes the source folder again, and both have the same loss.
    assert main(["export", imported, "--to", str(folder), "--check", "logits"]) == 0

    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "hello world"}\n')
    outputs = []
    for place in ("imported", "hf"):
        arguments = [
            "evaluate",
            "--from",
            str(tmp_path / place),
            "--data",
            f"texts={texts}",
            "--seq_len",
            "32",
        ]
        capsys.readouterr()
        assert main([*arguments, "--device", "cpu"]) == 0
        outputs.append(json.loads(capsys.readouterr().out)["sets"])

    assert outputs[0] == outputs[1]
