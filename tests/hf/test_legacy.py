"""Weights of old are converted by a command of its own; a file that wants more than tensors runs nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_files import bombs
from hub_folders import build, save
from safetensors.torch import load_file

from shardtrain.checkpoint import manifest
from shardtrain.checkpoint.tensors import read_whole
from shardtrain.cli import main
from shardtrain.hf import legacy, source

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def modern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama3"), tmp_path_factory.mktemp("modern") / "hf")


def old(modern: Path, folder: Path, parts: int = 1) -> Path:
    """The same weights as programs of old left them."""
    folder.mkdir()
    (folder / "config.json").write_bytes((modern / "config.json").read_bytes())
    tensors = load_file(modern / "model.safetensors")
    if parts == 1:
        torch.save(tensors, folder / "pytorch_model.bin")
        return folder
    weight_map = {}
    for number in range(parts):
        part = dict(list(tensors.items())[number::parts])
        torch.save(part, folder / f"pytorch_model-{number + 1}.bin")
        weight_map |= dict.fromkeys(part, f"pytorch_model-{number + 1}.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.mark.parametrize("parts", [1, 2])
def test_the_weights_are_those_of_the_safetensors(parts: int, modern: Path, tmp_path: Path) -> None:
    folder, output = old(modern, tmp_path / "old", parts), tmp_path / "checkpoint"
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    assert main(["import", str(folder), "--to", str(output)]) == 5, "no load falls back to a pickle"
    assert main(["import", str(folder), "--to", str(output), "--legacy_bin"]) == 0
    assert main(["import", str(modern), "--to", str(tmp_path / "expected")]) == 0
    found, expected = manifest.read(output), manifest.read(tmp_path / "expected")
    assert found.tensors.keys() == expected.tensors.keys()
    for name in expected.tensors:
        assert torch.equal(read_whole(found, output, name), read_whole(expected, tmp_path / "expected", name)), name
    kept = source.of_checkpoint(output, found)
    assert kept is not None and kept.read("generation_config.json") == b'{"temperature": 0.5}'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "expected", "old"]


def refused(folder: Path, output: Path, capfd: pytest.CaptureFixture[str], code: int = 5) -> str:
    capfd.readouterr()
    before = sorted(output.parent.iterdir())
    assert main(["import", str(folder), "--to", str(output), "--legacy_bin"]) == code
    # a slow machine is told every five seconds how far it is
    said = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("shardtrain import: ")]
    assert len(said) == 1 and sorted(output.parent.iterdir()) == before, said
    return said[0]


@pytest.mark.parametrize("kind", ["pickle-2", "torch-zip", "7z"])
def test_a_pickle_that_would_run_something_is_refused(
    kind: str, modern: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, canary = old(modern, tmp_path / "old"), tmp_path / "canary"
    (folder / "pytorch_model.bin").write_bytes(bombs(canary)[kind])
    assert "is not a file of tensors alone" in refused(folder, tmp_path / "checkpoint", capfd)
    assert not canary.exists()


def repeated(_: Path) -> Any:
    return {"model.embed_tokens.weight": torch.zeros(1).expand(2**40)}


def no_tensors(_: Path) -> Any:
    return {"model.embed_tokens.weight": [1.0, 2.0]}


@pytest.mark.parametrize(
    ("make", "told"), [(repeated, "would be 4398046511104 bytes"), (no_tensors, "is not a tensor")]
)
def test_what_is_not_a_table_of_tensors_is_refused(
    make: Any, told: str, modern: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = old(modern, tmp_path / "old")
    torch.save(make(tmp_path), folder / "pytorch_model.bin")
    assert told in refused(folder, tmp_path / "checkpoint", capfd)


def test_bounds_end_what_goes_beyond_them(
    modern: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = old(modern, tmp_path / "old")
    monkeypatch.setattr(legacy, "_BASE_BYTES", 2**26)  # too little for PyTorch itself
    assert "is not a file of tensors alone" in refused(folder, tmp_path / "checkpoint", capfd)
    monkeypatch.undo()
    monkeypatch.setattr(legacy, "_BASE_SECONDS", 0)
    assert refused(folder, tmp_path / "checkpoint", capfd)


def test_the_process_that_reads_has_no_secret(modern: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    seen: list[dict[str, str]] = []
    monkeypatch.setattr(legacy.subprocess, "run", lambda command, env, **_: seen.append(env) or os._exit)
    with pytest.raises(AttributeError):
        legacy._convert(modern / "model.safetensors", tmp_path / "out")
    assert "HF_TOKEN" not in seen[0] and "hf_secret" not in seen[0].values()


def test_what_lies_elsewhere_or_is_not_needed_is_refused(
    modern: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert "has safetensors" in refused(modern, tmp_path / "checkpoint", capfd, code=2)
    folder = old(modern, tmp_path / "old", parts=2)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "../x.bin"}}))
    assert "is not a .bin file of this folder" in refused(folder, tmp_path / "checkpoint", capfd)
