"""pytorch_model.bin, read only on request: the same tensors as from safetensors, and no pickled code runs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import bombs
from hub_folders import build, save
from safetensors.torch import load_file, save_file
from tiers import cases

from shardtrain import config, models
from shardtrain.checkpoint import manifest
from shardtrain.cli import main
from shardtrain.hf import importing, source
from shardtrain.hf.bin_weights import BinWeights
from shardtrain.hf.hub_model import recognise, translation_of
from shardtrain.hf.weights import BIN, HubWeights
from shardtrain.utils.errors import CheckpointError, ConfigError

FORMATS = {"zip": True, "before 1.6": False}
"""Format of torch.save -> True for the current one."""


def write(folder: Path, value: Any, name: str = "pytorch_model.bin", is_zip: bool = True) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save(value, folder / name, _use_new_zipfile_serialization=is_zip)
    return folder


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("form", FORMATS)
def test_saved_tensors_are_read_back(form: str, wrapped: bool, tmp_path: Path) -> None:
    full_tensor = torch.arange(24.0).reshape(4, 6)
    tensors = {
        "a": full_tensor,
        "b": full_tensor[1:3].t(),
        "c": torch.tensor(3.0).bfloat16(),
        "d": torch.nn.Parameter(full_tensor.half()),
    }
    saved = {"state_dict": tensors, "epoch": 3} if wrapped else tensors
    with BinWeights(write(tmp_path / "one", saved, is_zip=FORMATS[form])) as weights:
        assert weights.names() == sorted(tensors)
        for name, tensor in tensors.items():
            assert (weights.shape(name), weights.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
            torch.testing.assert_close(weights.read(name, ()), tensor.detach(), rtol=0, atol=0)
        assert torch.equal(weights.read("a", (slice(1, 3), slice(0, 2))), full_tensor[1:3, :2])


def test_several_files_are_found_with_their_index(tmp_path: Path) -> None:
    for number in (1, 2):
        write(
            tmp_path / "two",
            {f"w{number}": torch.full((2,), float(number))},
            f"pytorch_model-{number}.bin",
        )
    index = tmp_path / "two" / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"w1": "pytorch_model-1.bin", "w2": "pytorch_model-2.bin"}}')
    with BinWeights(tmp_path / "two") as weights:
        assert [float(weights.read(name, ())[0]) for name in weights.names()] == [1.0, 2.0]
    index.write_text('{"weight_map": {"w1": "../pytorch_model-1.bin"}}')

    with pytest.raises(CheckpointError, match="is not a file name like pytorch_model.bin"):
        BinWeights(tmp_path / "two")

    index.write_text('{"weight_map": {"w1": "pytorch_model-1.bin", "w3": "pytorch_model-3.bin"}}')
    with pytest.raises(
        CheckpointError,
        match=r"pytorch_model-3\.bin does not exist, but \S+\.bin\.index\.json refers to it",
    ):
        BinWeights(tmp_path / "two")


class Hostile:
    """Creates a folder when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("form", FORMATS)
def test_files_with_more_than_tensors_are_rejected_and_run_no_code(
    form: str, tmp_path: Path
) -> None:
    for value, message in (
        ({"a": Hostile(tmp_path / "ran")}, "nothing in it was run"),
        ({"a": torch.zeros(2), "note": "text"}, "note is not a tensor"),
        ([torch.zeros(2)], "contains no state dict"),
        ({}, "contains no state dict"),
        ({"a": torch.zeros(1).expand(2**40)}, "a tensor repeats its storage"),
    ):
        with pytest.raises(CheckpointError, match=message):
            BinWeights(write(tmp_path / "bad", value, is_zip=FORMATS[form]))
    assert not (tmp_path / "ran").exists()


def test_a_truncated_or_extended_file_from_before_1_6_is_rejected(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "old", {"a": torch.arange(100.0), "b": torch.ones(7).half()}, is_zip=False
    )
    content = (folder / BIN).read_bytes()
    places = [*range(2, 40), *range(40, len(content), 37), len(content) - 1]
    for damaged in [*(content[:size] for size in places), content + b"0"]:
        (folder / BIN).write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged"):
            BinWeights(folder)


def test_bin_weights_are_only_read_without_safetensors(tmp_path: Path) -> None:
    folder = write(tmp_path / "both", {"a": torch.zeros(2)})
    (folder / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match="has safetensors"):
        BinWeights(folder)


INCOMPLETE: list[tuple[type[HubWeights], list[str], str]] = [
    (
        BinWeights,
        [],
        "has neither model.safetensors nor model.safetensors.index.json; name the folder of a model",
    ),
    (BinWeights, ["training_args.bin"], "has neither"),
    (
        BinWeights,
        [
            "pytorch_model-00001-of-00002.bin",
            "pytorch_model-00002-of-00002.bin",
            "training_args.bin",
        ],
        "pytorch_model.bin.index.json, the index of pytorch_model-00001-of-00002.bin and 1 more files, does",
    ),
    (
        BinWeights,
        ["model-00001-of-00002.safetensors"],
        "model.safetensors.index.json, the index of",
    ),
    (
        HubWeights,
        ["model-00001-of-00002.safetensors"],
        "model.safetensors.index.json, the index of",
    ),
    (
        HubWeights,
        ["pytorch_model-00001-of-00002.bin"],
        "a pickle; save it with safe_serialization=True, or read it",
    ),
    (HubWeights, ["training_args.bin"], "has neither"),
]


@pytest.mark.parametrize(("reader", "files", "message"), INCOMPLETE)
def test_a_missing_index_of_weights_is_named(
    reader: type[HubWeights], files: list[str], message: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        reader(tmp_path)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("prefix", ["module.", "module.module.", "_orig_mod.module."])
def test_weights_of_a_wrapped_model_have_the_names_of_the_model(
    prefix: str, form: str, tmp_path: Path
) -> None:
    tensors = {
        f"{prefix}{name}": torch.full((2,), float(number))
        for number, name in enumerate(("a.b", "module.c"))
    }
    with BinWeights(write(tmp_path, tensors, is_zip=FORMATS[form])) as weights:
        assert weights.names() == ["a.b", "module.c"]
        assert [float(weights.read(name, ())[0]) for name in weights.names()] == [0.0, 1.0]
    # transformers does not read such safetensors files, so there is no reference.
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(
        CheckpointError, match=rf"save model\.{prefix.partition('.')[0]}\.state_dict\(\) instead"
    ):
        HubWeights(tmp_path)


def test_bin_weights_require_an_option_of_hugging_face_weights() -> None:
    wrong = config.check(
        config.load(None, ["--checkpoint.enable", "--checkpoint.initial_load_legacy_bin"])
    )
    assert [problem.option for problem in wrong] == ["checkpoint.initial_load_legacy_bin"]


@pytest.fixture(scope="module")
def modern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Safetensors folder in bfloat16 with norms in float32."""
    pytest.importorskip("transformers")
    folder = save(build("llama3"), tmp_path_factory.mktemp("modern") / "hf")
    tensors = load_file(folder / "model.safetensors")
    mixed = {
        name: tensor if "norm" in name else tensor.bfloat16() for name, tensor in tensors.items()
    }
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def old(modern: Path, folder: Path, form: str, parts: int = 1) -> Path:
    """Save the weights of ``modern`` in ``parts`` pytorch_model.bin files of the given format."""
    tensors = load_file(modern / "model.safetensors")
    if parts == 1:
        write(folder, {"state_dict": tensors}, is_zip=FORMATS[form])
    weight_map = {}
    for number in range(1, parts + 1) if parts > 1 else ():
        part = dict(list(tensors.items())[number - 1 :: parts])
        write(folder, part, f"pytorch_model-{number}.bin", FORMATS[form])
        weight_map |= dict.fromkeys(part, f"pytorch_model-{number}.bin")
    if weight_map:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_bytes((modern / "config.json").read_bytes())
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    return folder


@pytest.mark.parametrize(
    ("form", "parts"), cases([("zip", 2), ("before 1.6", 1)], [("zip", 1), ("before 1.6", 2)])
)
def test_import_and_run_read_the_same_weights_as_from_safetensors(
    form: str, parts: int, modern: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = old(modern, tmp_path / "old", form, parts)
    output = tmp_path / "checkpoint"
    back = tmp_path / "back"

    # A load must not fall back to a pickle, and transformers must not open one to compare logits.
    arguments = ["import", str(folder), "--to"]
    assert main([*arguments, str(output)]) == 5
    assert main([*arguments, f"{output}-2", "--legacy_bin", "--check", "logits"]) == 2
    assert main([*arguments, str(output), "--legacy_bin"]) == 0
    notice = "logits were not compared: transformers would unpickle the file"
    assert notice in capsys.readouterr().out

    files = source.of_checkpoint(output, manifest.read(output))
    assert files is not None
    assert files.read("generation_config.json") == b'{"temperature": 0.5}'

    # After import and export, the weights are bitwise equal and have their original dtypes.
    assert main(["export", str(output), "--to", str(back), "--check", "weights"]) == 0
    expected = load_file(modern / "model.safetensors")
    exported = load_file(back / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor)

    # A run reads the same weights, as float32.
    recognised = recognise(folder)
    module = models.find(recognised.name)
    model = models.build(module, recognised.config).to_empty(device="cpu")
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    importing.fill(tensors, folder, module, recognised.config, legacy_bin=True)
    assert torch.equal(tensors["model.norm.weight"], expected["model.norm.weight"])
    assert torch.equal(tensors["model.embed.weight"], expected["model.embed_tokens.weight"].float())

    dtypes = source.dtypes_of(folder, translation_of(module, recognised.config, "test"))
    assert dtypes["norm.weight"] == "float32"
    assert dtypes["embed.weight"] == "bfloat16"


@pytest.mark.parametrize("kind", ["pickle-2", "torch-zip", "7z"])
def test_an_import_runs_nothing_of_a_pickle(
    kind: str, modern: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = old(modern, tmp_path / "old", "zip")
    canary = tmp_path / "canary"
    (folder / BIN).write_bytes(bombs(canary)[kind])
    capfd.readouterr()

    assert main(["import", str(folder), "--to", str(tmp_path / "checkpoint"), "--legacy_bin"]) == 5
    assert str(folder / BIN) in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old"]
