"""Weights of multi-token prediction in the published layout: import, training, export, and folders without them."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run as run_command
from hf_architectures import hf_folder
from hub_folders import build, save
from safetensors.torch import load_file, save_file
from tiny import text_file
from torch import Tensor

from shardtrain.cli import main


def published(folder: Path, num_depths: int = 1, **changed: Any) -> Path:
    """Save a tiny DeepSeek-V3 with multi-token prediction layers, named as those of the published weights.

    ``transformers`` has no such layers, so those of its last layer are copied with noise.
    """
    model = build("deepseek_v3", vocab_size=400, **changed)
    save(model, folder)
    tensors = load_file(folder / "model.safetensors")
    num_layers = model.config.num_hidden_layers
    last = f"model.layers.{num_layers - 1}."
    generator = torch.Generator().manual_seed(3)
    hidden = model.config.hidden_size
    for depth in range(num_depths):
        prefix = f"model.layers.{num_layers + depth}."
        for name in [name for name in tensors if name.startswith(last)]:
            tensors[prefix + name.removeprefix(last)] = tensors[name] * 0.9
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden)
        projection = torch.randn(hidden, 2 * hidden, generator=generator) * 0.1
        tensors[f"{prefix}eh_proj.weight"] = projection
        # The published files repeat the shared embedding and head in each layer.
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    fields = json.loads((folder / "config.json").read_text())
    fields["num_nextn_predict_layers"] = num_depths
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def shapes_of(folder: Path) -> dict[str, Any]:
    return {name: tuple(tensor.shape) for name, tensor in tensors_of(folder).items()}


def trained(folder: Path, output: Path, num_depths: int = 1, from_weights: bool = True) -> Path:
    """Train two steps from a folder with the command line, and return the folder of the run."""
    start = [f"--checkpoint.initial_load_path={folder}", "--checkpoint.initial_load_in_hf"]
    done = run_command(
        [
            sys.executable,
            "-m",
            "shardtrain",
            "train",
            "--model.name=deepseek_v3",
            f"--job.dump_folder={output}",
            "--model.flavor=from_folder",
            f"--model.hf_assets_path={folder}",
            "--model.tokenizer_path=bytes",
            f"--model.overrides.num_nextn_predict_layers={num_depths}",
            "--training.dataset=text",
            f"--training.dataset_path={text_file()}",
            "--training.steps=2",
            "--training.seq_len=32",
            "--training.local_batch_size=2",
            "--training.device=cpu",
            "--optimizer.lr=1e-2",
            "--checkpoint.enable",
            *(start if from_weights else []),
            "--checkpoint.interval=2",
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return output


def test_published_weights_are_trained_and_exported(tmp_path: Path) -> None:
    folder = published(tmp_path / "hf", num_depths=2)
    output = trained(folder, tmp_path / "run", num_depths=2)
    back = tmp_path / "back"

    assert main(["export", str(output), "--to", str(back), "--check", "weights"]) == 0
    assert shapes_of(back) == shapes_of(folder)
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 2

    # The layers share the embedding and the head, and training changed their other weights.
    tensors = tensors_of(back)
    before = tensors_of(folder)
    embedding = tensors["model.embed_tokens.weight"]
    num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    for number in (num_layers, num_layers + 1):
        prefix = f"model.layers.{number}."
        assert torch.equal(tensors[f"{prefix}embed_tokens.weight"], embedding)
        assert torch.equal(tensors[f"{prefix}shared_head.head.weight"], tensors["lm_head.weight"])
        for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm", "self_attn.o_proj"):
            key = f"{prefix}{name}.weight"
            assert not torch.equal(tensors[key], before[key]), key


def test_export_can_drop_prediction_layers_for_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = published(tmp_path / "hf")
    output = trained(folder, tmp_path / "run")
    full, small = tmp_path / "full", tmp_path / "small"

    assert main(["export", str(output), "--to", str(full), "--check", "weights"]) == 0

    # --check logits compares our logits with those of transformers
    arguments = ["export", str(output), "--to", str(small), "--drop_mtp", "--check", "logits"]
    assert main(arguments) == 0

    num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    extra = {name for name in shapes_of(full) if name.startswith(f"model.layers.{num_layers}.")}
    assert extra
    assert shapes_of(small).keys() == shapes_of(full).keys() - extra
    assert json.loads((small / "config.json").read_text())["num_nextn_predict_layers"] == 0

    # transformers ignores the layers in the other folder
    tokens = torch.arange(12).unsqueeze(0)
    logits = []
    for path in (full, small):
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        logits.append(model.eval()(tokens).logits)

    assert torch.equal(*logits)


def test_import_keeps_prediction_layers_on_request(tmp_path: Path) -> None:
    folder = published(tmp_path / "hf")
    checkpoint, back = tmp_path / "checkpoint", tmp_path / "back"
    arguments = ["import", str(folder), "--to", str(checkpoint), "--keep_mtp", "--check", "weights"]

    assert main(arguments) == 0
    assert main(["export", str(checkpoint), "--to", str(back), "--check", "weights"]) == 0

    tensors = tensors_of(folder)
    assert tensors_of(back).keys() == tensors.keys()
    for name, tensor in tensors_of(back).items():
        assert torch.equal(tensor, tensors[name]), name
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("num_depths", [0, 1])
@pytest.mark.parametrize("has_field", [True, False])
def test_export_counts_prediction_layers_of_a_run_from_a_config_alone(
    has_field: bool, num_depths: int, tmp_path: Path
) -> None:
    folder = published(tmp_path / "hf")
    (folder / "model.safetensors").unlink()
    if not has_field:
        fields = json.loads((folder / "config.json").read_text())
        del fields["num_nextn_predict_layers"]
        (folder / "config.json").write_text(json.dumps(fields))
    output = trained(folder, tmp_path / "run", num_depths, from_weights=False)
    back, checkpoint, again = tmp_path / "back", tmp_path / "checkpoint", tmp_path / "again"

    assert main(["export", str(output), "--to", str(back), "--check", "weights"]) == 0

    # Import the exported folder, and export it again.
    arguments = ["import", str(back), "--to", str(checkpoint), "--check", "weights"]
    assert main([*arguments, *["--keep_mtp"] * num_depths]) == 0
    assert main(["export", str(checkpoint), "--to", str(again), "--check", "weights"]) == 0

    num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    for path in (back, again):
        written = json.loads((path / "config.json").read_text())
        assert written.get("num_nextn_predict_layers", 0) == num_depths
        has_layer = any(name.startswith(f"model.layers.{num_layers}.") for name in shapes_of(path))
        assert has_layer == bool(num_depths)


def test_export_of_a_class_of_transformers_has_no_prediction_layers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = shutil.copytree(hf_folder("glm4_moe"), tmp_path / "hf")
    fields = json.loads((folder / "config.json").read_text())
    fields["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(fields))
    checkpoint, back = tmp_path / "checkpoint", tmp_path / "back"

    assert main(["import", str(folder), "--to", str(checkpoint), "--check", "weights"]) == 0
    assert main(["export", str(checkpoint), "--to", str(back), "--check", "weights"]) == 0
    assert json.loads((back / "config.json").read_text())["num_nextn_predict_layers"] == 0


def test_generate_ignores_prediction_layers(tmp_path: Path, capsys: Any) -> None:
    folder = published(tmp_path / "hf")
    output = trained(folder, tmp_path / "run")
    small = tmp_path / "small"
    arguments = ["export", str(output), "--to", str(small), "--drop_mtp", "--check", "weights"]

    assert main(arguments) == 0

    # Generation ignores multi-token prediction: the checkpoint has its layers, the exported folder
    # does not.
    capsys.readouterr()
    texts = []
    for path in (output, small):
        arguments = ["generate", "--from", str(path), "--prompt", "mesh", "--max_new_tokens", "8"]
        if path == small:
            arguments += ["--tokenizer", "bytes"]
        assert main([*arguments, "--dtype", "float32", "--temperature", "0"]) == 0
        texts.append(capsys.readouterr().out)

    assert texts[0] == texts[1]


def _without_layers(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    fields["num_nextn_predict_layers"] = 0
    (folder / "config.json").write_text(json.dumps(fields))


def _without_files(folder: Path) -> None:
    tensors = tensors_of(folder)
    remaining = {name: tensor for name, tensor in tensors.items() if "eh_proj" not in name}
    save_file(remaining, folder / "model.safetensors", metadata={"format": "pt"})


def _with_other_embedding(folder: Path) -> None:
    tensors = tensors_of(folder)
    name = next(
        name for name in tensors if name.endswith(".embed_tokens.weight") and "layers" in name
    )
    tensors[name] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_layers, "has no layers of multi-token prediction"),
        (_without_files, "1 missing: model.layers."),
        (_with_other_embedding, "1 unequal to the tensor they must repeat: model.layers."),
    ],
)
def test_folders_without_prediction_layers_are_refused(
    damage: Any, message: str, tmp_path: Path, capsys: Any
) -> None:
    folder = published(tmp_path / "hf")
    damage(folder)
    arguments = ["import", str(folder), "--to", str(tmp_path / "out"), "--keep_mtp"]

    assert main(arguments) in (2, 5)
    assert message in capsys.readouterr().err


def test_a_run_refuses_a_folder_without_prediction_layers(tmp_path: Path) -> None:
    folder = published(tmp_path / "hf")
    _without_layers(folder)
    with pytest.raises(AssertionError, match="exceeds the 0 layers of multi-token prediction in"):
        trained(folder, tmp_path / "run")
