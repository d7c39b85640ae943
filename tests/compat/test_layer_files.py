"""Checkpoints with one file per layer and model-parallel rank: bitwise round trips, and hostile files run no code."""

from __future__ import annotations

import io
import json
import operator
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fmengine_runs import VOCABULARY, hf_folder, same, tensors
from hostile_files import bombs
from tiers import cases

from shardtrain import cli
from shardtrain.compat.layer_files import LayerWeights, step_of
from shardtrain.utils.errors import CheckpointError

STEP = "global_step001"


def write_layer_folder(folder: Path, family: str, shards: int, **changed: Any) -> Path:
    """Write a folder with one file per layer, next to the Hugging Face folder of its model."""
    hf = hf_folder(folder / "hf", family, **changed)
    arguments = ["checkpoint", "to-fmengine", str(hf), str(folder / "fm")]
    assert cli.main([*arguments, f"--mp_world_size={shards}"]) == 0
    return folder / "fm"


@pytest.fixture(scope="module")
def good_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_layer_folder(tmp_path_factory.mktemp("good"), "llama2", 2)


@pytest.mark.parametrize(
    ("family", "shards", "layers"),
    cases(
        [("llama2", 2, 2), ("mistral", 1, 2), ("neox", 2, 2), ("llama3-tied", 1, 2)],
        nightly=[("llama2", n, k) for n in (1, 2, 4) for k in (4, 12)]
        + [("neox", 4, 12), ("mistral", 2, 4)],
    ),
)
def test_a_model_survives_a_round_trip_through_layer_files(
    tmp_path: Path, family: str, shards: int, layers: int
) -> None:
    folder = write_layer_folder(tmp_path, family, shards, num_hidden_layers=layers)
    expected = set()
    for shard in range(shards):
        expected.add(f"mp_rank_{shard:02d}_model_states.pt")
        # files for the layers and for the embedding, the norm and the head
        for number in range(layers + 3):
            expected.add(f"layer_{number:02d}-model_{shard:02d}-model_states.pt")

    assert {path.name for path in (folder / STEP).iterdir()} == expected
    assert (folder / "latest").read_text() == STEP

    assert cli.main(["export", str(folder), "--to", str(tmp_path / "back"), "--check=weights"]) == 0
    same(tensors(tmp_path / "back"), tensors(tmp_path / "hf"))


def test_layer_files_match_fmengine_s_format(good_folder: Path) -> None:
    """The contents, names and shards of each file follow FMEngine's rules."""
    full_weights = tensors(good_folder.parent / "hf")

    def file(number: int, shard: int) -> dict[str, torch.Tensor]:
        path = good_folder / STEP / f"layer_{number:02d}-model_{shard:02d}-model_states.pt"
        tensors_of_file: dict[str, torch.Tensor] = torch.load(path, weights_only=True)
        return tensors_of_file

    colwise = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    rowwise = ("o_proj", "down_proj")
    for shard in (0, 1):
        rows = slice(shard * VOCABULARY // 2, (shard + 1) * VOCABULARY // 2)
        same(file(0, shard), {"weight": full_weights["model.embed_tokens.weight"][rows]})
        same(file(3, shard), {"weight": full_weights["model.norm.weight"]})
        same(file(4, shard), {"weight": full_weights["lm_head.weight"][rows]})
        for layer in (0, 1):
            prefix = f"model.layers.{layer}."
            expected = {}
            for key, weight in full_weights.items():
                if not key.startswith(prefix):
                    continue
                # The two shards split these projections as Megatron does: by outputs or by inputs.
                if any(projection in key for projection in colwise):
                    weight = weight.chunk(2, 0)[shard]
                elif any(projection in key for projection in rowwise):
                    weight = weight.chunk(2, 1)[shard]
                expected[key.removeprefix(prefix)] = weight
            same(file(layer + 1, shard), expected)

    state = torch.load(good_folder / STEP / "mp_rank_01_model_states.pt", weights_only=True)
    assert state["mp_world_size"] == 2
    assert state["global_steps"] == 1
    assert state["module"] is None


def write_trained_step(folder: Path, number: int, hf: dict[str, torch.Tensor]) -> None:
    """Write a step as FMEngine does after training. The embedding of an added token is the number of the step."""
    folder.mkdir(parents=True)
    added_row = torch.full((1, 32), float(number))
    embedding = torch.cat([hf["model.embed_tokens.weight"], added_row])
    head = torch.cat([hf["lm_head.weight"], torch.zeros(1, 32)])
    norm = torch.nn.Parameter(hf["model.norm.weight"])
    files: dict[int, dict[str, torch.Tensor]] = {0: {"weight": embedding}, 3: {"weight": norm}}
    files[4] = {"weight": head}
    for layer in (0, 1):
        prefix = f"model.layers.{layer}."
        table = {"self_attn.rotary_emb.inv_freq": torch.ones(4)}
        for name, tensor in hf.items():
            if name.startswith(prefix):
                table[name.removeprefix(prefix)] = tensor
        files[layer + 1] = table

    # DeepSpeed saves views of a tensor, and states that contain code.
    for number_of_file, table in files.items():
        views = {name: tensor[:] for name, tensor in table.items()}
        torch.save(views, folder / f"layer_{number_of_file}-model_00-model_states.pt")
    torch.save({"anything": os.getcwd}, folder / "mp_rank_00_model_states.pt")


def test_files_as_fmengine_writes_them_are_read(good_folder: Path, tmp_path: Path) -> None:
    """Read files with the peculiarities of real FMEngine steps.

    Shards are views of the full tensor, and file names lack leading zeros. There are rotary tables,
    states of DeepSpeed, and embedding rows for added tokens.
    """
    hf = tensors(good_folder.parent / "hf")
    folder = tmp_path / "trained"
    write_trained_step(folder / "global_step5", 5, hf)
    write_trained_step(folder / "global_step10", 10, hf)
    (folder / "latest").write_text("global_step10\n")
    base = ["--base-model", str(good_folder.parent / "hf")]
    expected = {name: tensor[:VOCABULARY] for name, tensor in hf.items()}

    for step, row in (("latest", 10.0), ("global_step5", 5.0)):
        out = str(tmp_path / step)
        arguments = ["checkpoint", "from-fmengine", str(folder), out, *base, "--step", step]
        assert cli.main(arguments) == 0
        assert cli.main(["export", out, "--to", f"{out}-hf", "--check=weights"]) == 0
        imported = tensors(Path(f"{out}-hf"))
        assert bool((imported["model.embed_tokens.weight"][-1] == row).all())
        same({name: tensor[:VOCABULARY] for name, tensor in imported.items()}, expected)

    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "global_step5", "global_step5-hf", "latest", "latest-hf", "trained",
    ]  # fmt: skip


def test_adapters_of_a_step_become_a_peft_folder(tmp_path: Path) -> None:
    step = tmp_path / "run/global_step3"
    step.mkdir(parents=True)
    out = tmp_path / "out"
    torch.manual_seed(0)
    parts = {}
    for projection in ("q_proj", "v_proj"):
        parts[f"self_attn.{projection}.lora_A"] = torch.randn(4, 32)
        parts[f"self_attn.{projection}.lora_B"] = torch.randn(32, 4)
    layer_file = {**parts, "input_layernorm.weight": torch.ones(32)}
    torch.save(layer_file, step / "layer_01-model_00-model_states.pt")

    arguments = ["checkpoint", "from-fmengine", str(tmp_path / "run"), str(out), "--adapter"]
    assert cli.main([*arguments, "--lora_alpha", "16"]) == 0

    from safetensors.torch import load_file

    adapters = load_file(str(out / "adapter_model.safetensors"))
    prefix = "base_model.model.model.layers.0."
    assert adapters.keys() == {f"{prefix}{name}.weight" for name in parts}
    for name, tensor in parts.items():
        assert torch.equal(adapters[f"{prefix}{name}.weight"], tensor)

    import peft
    from hub_folders import build

    # PEFT opens the folder. The scaling is alpha divided by the rank, 16 / 4.
    model = peft.PeftModel.from_pretrained(build("llama2", num_hidden_layers=1), str(out))
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.scaling["default"] == 4.0
    assert torch.equal(layer.lora_A["default"].weight, parts["self_attn.q_proj.lora_A"])


def resaved(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, Path], None]:
    """Change the file of the first layer, and save it again."""

    def write(file: Path, canary: Path) -> None:
        table = torch.load(file, weights_only=True)
        torch.save(change(table) or table, file)

    return write


def zipped(
    change: Callable[[str, bytes], tuple[str, bytes]], kind: int = zipfile.ZIP_STORED
) -> Any:
    """Rewrite the archive with changed members."""

    def write(file: Path, canary: Path) -> None:
        with zipfile.ZipFile(file) as archive:
            members = [change(name, archive.read(name)) for name in archive.namelist()]
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", kind) as archive:
            for name, data in members:
                archive.writestr(name, data)
        file.write_bytes(buffer.getvalue())

    return write


def cyclic(table: dict[str, Any]) -> Any:
    loop: list[Any] = []
    loop.append(loop)
    return {**table, "loop": loop}


def shared(table: dict[str, Any]) -> Any:
    value: Any = 0
    for _ in range(70):
        value = [value, value]
    return {**table, "deep": value}


def bomb(name: str) -> Callable[[Path, Path], None]:
    return lambda file, canary: file.write_bytes(bombs(canary)[name]) and None


HOSTILE: dict[str, Callable[[Path, Path], None]] = {
    **{
        name: bomb(name)
        for name in ("pickle-0", "pickle-2", "pickle-4", "pickle-5", "torch-zip", "7z")
    },
    "a function": resaved(lambda table: {**table, "x": operator.attrgetter("x")}),
    "cut": lambda file, _: file.write_bytes(file.read_bytes()[:-400]) and None,
    "empty": lambda file, _: file.write_bytes(b"") and None,
    "compressed": zipped(lambda name, data: (name, data), zipfile.ZIP_DEFLATED),
    "another byte": lambda file, _: file.write_bytes(
        bytes(b ^ (i == 3000) for i, b in enumerate(file.read_bytes()))
    ),
    "no storage": zipped(lambda name, data: (name.replace("/data/0", "/other/0"), data)),
    "big-endian": zipped(lambda name, data: (name, b"big" if name.endswith("byteorder") else data)),
    "expanded": resaved(lambda table: {**table, "x": torch.ones(1).expand(2**30)}),
    "a part of itself": resaved(cyclic),
    "nested": resaved(shared),
    "no table": resaved(lambda table: [1]),
    "no tensor": resaved(lambda table: {**table, "x": "text"}),
    "strange name": resaved(lambda table: {**table, "\x1b[2J": torch.ones(1)}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_runs_nothing_and_is_one_line(
    name: str, good_folder: Path, tmp_path: Path, capfd: Any
) -> None:
    folder = tmp_path / "fm"
    canary = tmp_path / "canary"
    shutil.copytree(good_folder, folder)
    HOSTILE[name](folder / STEP / "layer_01-model_00-model_states.pt", canary)
    for arguments in (
        ["export", str(folder), "--to"],
        ["checkpoint", "from-fmengine", str(folder)],
    ):
        assert cli.main([*arguments, str(tmp_path / "out")]) == 5
        error = capfd.readouterr().err
        assert len(error.strip().splitlines()) == 1
        assert "layer_01-model_00" in error
        assert "\x1b" not in error

    assert [path.name for path in tmp_path.iterdir()] == ["fm"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("layer_01-model_01-model_states.pt", "1 missing: layer_01-model_01-model_states.pt"),
        ("layer_03-model_00-model_states.pt", "1 missing: layer_03-model_00-model_states.pt"),
        ("surplus", "2 surplus: layer_05-model_00-model_states.pt"),
        ("a tensor", "self_attn.q_proj.weight is in 1 of 2"),
        ("both", "1 missing: model.layers.0.self_attn.q_proj.weight"),
        ("more", "1 not in this model: model.layers.0.self_attn.surplus"),
        ("shape", "1 with another shape: model.layers.0.self_attn.q_proj.weight [16, 32]"),
        ("copies", "model.layers.0.input_layernorm.weight differs between"),
        ("latest", "names 'global_step9'"),
        ("twice", "has both"),
        ("adapters", "contains adapters"),
        ("family", "model_type 'gpt2'"),
    ],
)
def test_missing_and_surplus_tensors_are_named_without_writing(
    change: str, message: str, good_folder: Path, tmp_path: Path, capfd: Any
) -> None:
    folder = tmp_path / "fm"
    shutil.copytree(good_folder, folder)
    step = folder / STEP
    files = [step / f"layer_01-model_{shard:02d}-model_states.pt" for shard in (0, 1)]

    def each(number: int, edit: Callable[[dict[str, Any]], Any]) -> None:
        for file in files[:number]:
            table = torch.load(file, weights_only=True)
            edit(table)
            torch.save(table, file)

    q = "self_attn.q_proj.weight"
    if change.startswith("layer_"):
        (step / change).unlink()
    elif change == "surplus":
        for shard in (0, 1):
            shutil.copy(files[0], step / f"layer_05-model_{shard:02d}-model_states.pt")
    elif change in ("a tensor", "both"):
        each(1 if change == "a tensor" else 2, lambda table: table.pop(q))
    elif change == "more":
        each(2, lambda table: table.update({"self_attn.surplus": torch.ones(2)}))
    elif change == "shape":
        each(2, lambda table: table.update({q: table[q][:8]}))
    elif change == "copies":
        each(1, lambda table: table["input_layernorm.weight"].add_(1))
    elif change == "latest":
        (folder / "latest").write_text("global_step9")
    elif change == "twice":
        shutil.copy(files[0], step / "layer_1-model_0-model_states.pt")
    elif change == "adapters":
        each(2, lambda table: table.update({"self_attn.q_proj.lora_A": torch.ones(4, 32)}))
    else:
        gpt2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
        (folder / "config.json").write_text(json.dumps(gpt2))

    # The damaged folder is refused in both directions.
    for verb in ("from-fmengine", "to-fmengine"):
        code = cli.main(["checkpoint", verb, str(folder), str(tmp_path / "out")])
        error = capfd.readouterr().err
        assert code in (2, 5)
        assert message in error
        assert len(error.strip().splitlines()) == 1
        assert ".tmp-" not in error, "the message must name the user's folder"

    assert [path.name for path in tmp_path.iterdir()] == ["fm"]


def test_an_indivisible_model_is_rejected_with_a_fix(
    good_folder: Path, tmp_path: Path, capfd: Any
) -> None:
    for shards, message in (
        (3, "--vocab_size 513"),
        (8, "heads"),
        (0, "must be between"),
        (1000, "must be between"),
    ):
        arguments = [
            "checkpoint",
            "to-fmengine",
            str(good_folder),
            str(tmp_path / "out"),
            f"--mp_world_size={shards}",
        ]
        assert cli.main(arguments) == 2
        assert message in capfd.readouterr().err

    assert list(tmp_path.iterdir()) == []


def test_without_latest_the_newest_step_is_read(good_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fm"
    shutil.copytree(good_folder, folder)
    shutil.copytree(folder / STEP, folder / "global_step12")
    (folder / "latest").unlink()

    assert step_of(folder).name == "global_step12"

    (folder / "latest").write_text("../" * 300)
    with pytest.raises(CheckpointError, match="latest names"):
        LayerWeights(folder)
