"""Each error in adapters is one line. Nothing is trained, and no partial files are written."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import torch
from hub_folders import build, save
from lora_runs import adapter_config, train
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny import make_run, tiny_config

from shardtrain import cli
from shardtrain.config import Loaded, check
from shardtrain.lora.peft import PeftFolder
from shardtrain.models import llama3
from shardtrain.utils.errors import CheckpointError, ConfigError, ShardtrainError

ON = {"enable": True, "random_base": True}


@pytest.mark.parametrize(
    ("sections", "texts"),
    [
        ({"lora": {**ON, "rank": 0}}, ["lora.rank=0", "at least 1"]),
        ({"lora": {**ON, "rank": 65}}, ["lora.rank=65", "width of 64"]),
        (
            {
                "lora": {**ON, "target_modules": ["wq", "lm_head"]},
                "model": {"overrides": {"tied_embeddings": True}},
            },
            ["lora.target_modules", "names lm_head, whose weight is the embedding's"],
        ),
        (
            {"lora": {**ON, "target_modules": ["wq", "head"]}, "task": {"name": "reward_model"}},
            ["lora.target_modules", "names head, whose full weight task.name=reward_model trains"],
        ),
        (
            {"lora": {**ON, "target_modules": ["head"], "modules_to_save": ["lm_head"]}},
            ["lora.target_modules", "names head, whose full weight lora.modules_to_save trains"],
        ),
        ({"lora": {**ON, "dropout": 1.0}}, ["lora.dropout=1", "below 1"]),
        ({"lora": {**ON, "dropout": -0.1}}, ["lora.dropout=-0.1", "at least 0"]),
        ({"lora": {**ON, "alpha": 0.0}}, ["lora.alpha=0", "above 0"]),
        (
            {"lora": {"enable": True}},
            ["lora.enable", "checkpoint.initial_load_path", "lora.random_base"],
        ),
        (
            {"lora": ON, "checkpoint": {"enable": True, "initial_load_path": "x"}},
            ["lora.random_base", "remove one of them"],
        ),
        (
            {"lora": {**ON, "dropout": 0.1}, "parallelism": {"tensor_parallel_degree": 2}},
            ["lora.dropout=0.1", "tensor_parallel_degree"],
        ),
        (
            {"lora": {**ON, "initial_load_path": "x"}},
            ["lora.initial_load_path", "checkpoint.enable = true"],
        ),
        (
            {"lora": {**ON, "target_parameters": ["experts.down_proj"], "dropout": 0.1}},
            ["lora.dropout=0.1", "lora.target_parameters"],
        ),
        (
            {"lora": {**ON, "target_parameters": ["experts.down_proj"], "use_dora": True}},
            ["lora.use_dora=true", "lora.target_parameters"],
        ),
        (
            {"lora": ON, "checkpoint": {"initial_load_model_only": False}},
            ["checkpoint.initial_load_model_only", "frozen"],
        ),
    ],
)
def test_options_that_cannot_work_are_refused_before_ranks_start(sections, texts):
    problems = [str(problem) for problem in check(Loaded(tiny_config(**sections)))]
    assert len(problems) == 1, problems
    for text in texts:
        assert text in problems[0], problems
    assert not check(Loaded(tiny_config(lora=ON)))


def refusal(rank, config):
    with pytest.raises(ConfigError) as caught:
        make_run(rank, config)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_pro"], "did you mean q_proj?"),
        (["wx", "v_proj"], 'lora.target_modules="wx" matches no module of the model'),
        (["attn_norm"], "not a linear module that can have an adapter"),
        (["layers.*.attn"], "not a linear module that can have an adapter"),
        (["w1"], "lora.rank=40 exceeds 32"),
    ],
)
def test_an_unknown_target_is_named_with_the_nearest(targets, message):
    rank = 40 if "w1" in targets else 4
    sizes = {"ffn_dim": 32} if "w1" in targets else {}
    config = tiny_config(
        model={"overrides": sizes}, lora={**ON, "rank": rank, "target_modules": targets}
    )
    [[line]] = run_ranks(1, refusal, config)

    assert message in line


def test_experts_and_routers_are_not_targets():
    moe = {
        "vocab_size": 512,
        "dim": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
    }
    for target, message in (
        ("experts", "are a stack of all experts"),
        ("moe.router.gate", "a router"),
    ):
        config = tiny_config(lora={**ON, "rank": 4, "target_modules": [target]})
        model = dataclasses.replace(
            config.model,
            name="mixtral",
            flavor="debugmodel",
            overrides={**moe, "moe_ffn_dim": 32, "num_experts": 4, "top_k": 2},
        )
        [[line]] = run_ranks(1, refusal, dataclasses.replace(config, model=model))

        assert message in line


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps, and its adapters in a PEFT folder."""
    root = tmp_path_factory.mktemp("run")
    base = save(build("llama3"), root / "base")
    assert train(1, adapter_config(base, root / "run", training={"steps": 2}))[0].error is None
    arguments = [
        "export",
        str(root / "run" / "checkpoint" / "step-2"),
        "--to",
        str(root / "peft"),
        "--adapter",
    ]
    assert cli.main(arguments) == 0
    return root


def errors_of(config) -> str:
    error = train(1, config)[0].error
    assert isinstance(error, ShardtrainError)
    return "\n".join(map(str, getattr(error, "problems", None) or [error]))


def test_weights_that_changed_under_their_adapters_are_refused(run, tmp_path):
    shutil.copytree(run / "run", tmp_path / "run")
    save(build("llama3", seed=1), tmp_path / "other")
    config = adapter_config(tmp_path / "other", tmp_path / "run", training={"steps": 4})
    line = errors_of(config)

    assert "does not contain the base weights of the adapters" in line
    assert str(run / "base") in line

    step = str(tmp_path / "run" / "checkpoint" / "step-2")
    assert (
        cli.main(
            ["merge", step, "--to", str(tmp_path / "merged"), "--base", str(tmp_path / "other")]
        )
        == 2
    )
    assert not (tmp_path / "merged").exists()

    # The same bytes in another folder are the same weights.
    shutil.copytree(run / "base", tmp_path / "moved")
    assert (
        cli.main(
            ["merge", step, "--to", str(tmp_path / "merged"), "--base", str(tmp_path / "moved")]
        )
        == 0
    )


def test_full_models_and_adapters_are_distinguished(run, tmp_path, capsys):
    step = run / "run" / "checkpoint" / "step-2"
    assert cli.main(["export", str(step), "--to", str(tmp_path / "hf")]) == 2
    assert "contains adapters, but no full model" in capsys.readouterr().err

    config = adapter_config(run / "base", tmp_path / "run")
    as_base = dataclasses.replace(
        config.checkpoint, initial_load_path=str(step), initial_load_in_hf=False
    )
    assert "merge the adapters first" in errors_of(dataclasses.replace(config, checkpoint=as_base))
    assert cli.main(["import", str(run / "base"), "--to", str(tmp_path / "full")]) == 0
    assert cli.main(["merge", str(tmp_path / "full"), "--to", str(tmp_path / "merged")]) == 5

    lora = dataclasses.replace(config.lora, initial_load_path=str(tmp_path / "full"))
    assert "contains a full model and no adapters" in errors_of(
        dataclasses.replace(config, lora=lora)
    )

    other = dataclasses.replace(config.lora, initial_load_path=str(run / "peft"), alpha=3.0)
    assert "alpha is 8.0 instead of 3.0" in errors_of(dataclasses.replace(config, lora=other))


def damage(folder, **fields) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lora_bias": True}, "lora_bias"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"bias": "all"}, "bias='all'"),
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"auto_map": {"AutoModel": "evil.py"}}, "auto_map"),
        ({"trust_" + "remote_code": True}, "remote_code"),
        ({"r": 0}, "r=0"),
        ({"r": "8"}, "r='8'"),
        ({"lora_alpha": None}, "lora_alpha=None"),
    ],
)
def test_unsupported_options_of_a_peft_folder_are_rejected(run, tmp_path, fields, message):
    shutil.copytree(run / "peft", tmp_path / "peft")
    damage(tmp_path / "peft", **fields)
    with pytest.raises(ConfigError) as caught:
        PeftFolder(tmp_path / "peft", llama3, shape_of(run))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def shape_of(run):
    from shardtrain.hf.hub_model import recognise

    return recognise(run / "base").config


def test_a_damaged_folder_of_peft_is_refused(run, tmp_path):
    shape = shape_of(run)

    def message(change) -> str:
        shutil.rmtree(tmp_path / "peft", ignore_errors=True)
        shutil.copytree(run / "peft", tmp_path / "peft")
        change(tmp_path / "peft" / "adapter_model.safetensors")
        with pytest.raises(CheckpointError) as caught:
            PeftFolder(tmp_path / "peft", llama3, shape)
        return str(caught.value)

    def truncate(path) -> None:
        path.write_bytes(path.read_bytes()[:-9])

    def rename_to_pickle(path) -> None:
        path.rename(path.parent / "adapter_model.bin")

    def delete(path) -> None:
        path.unlink()

    assert "truncated" in message(truncate)
    assert "a pickle, which is never opened" in message(rename_to_pickle)
    assert "no weights" in message(delete)

    # The files are valid, but their tensors do not belong to this model.
    def remove_first(path) -> None:
        tensors = load_file(path)
        tensors.pop(sorted(tensors)[0])
        save_file(tensors, path)

    def widen_first(path) -> None:
        tensors = load_file(path)
        tensors[sorted(tensors)[0]] = torch.zeros(4, 33)
        save_file(tensors, path)

    def rename_layer(path) -> None:
        tensors = load_file(path)
        renamed = {name.replace("layers.1", "layers.7"): t for name, t in tensors.items()}
        save_file(renamed, path)

    for change in (remove_first, widen_first, rename_layer):
        assert "does not fit this model" in message(change)


def test_a_damaged_checkpoint_is_not_merged(run, tmp_path):
    shutil.copytree(run / "run", tmp_path / "run")
    step = tmp_path / "run" / "checkpoint" / "step-2"
    file = step / "rank-00000.bin"
    file.write_bytes(file.read_bytes()[:-1])

    assert cli.main(["merge", str(step), "--to", str(tmp_path / "merged")]) == 5
    assert cli.main(["export", str(step), "--to", str(tmp_path / "merged"), "--adapter"]) == 5
    assert not list(tmp_path.glob("merged*"))
