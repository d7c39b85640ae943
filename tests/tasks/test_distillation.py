"""Distillation: one loss on every mesh, a frozen teacher, and unsuitable teachers rejected early."""

from __future__ import annotations

import dataclasses
import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import build, save
from ranks import run_ranks
from tiers import cases
from tiny import Ended, assert_bitwise, assert_same_numbers, run_tiny, tiny_config, train_whole
from tiny_tokenizers import bpe_folder

from shardtrain.config import Loaded
from shardtrain.config.rules import check
from shardtrain.config.schema import Config, Parallelism, Task
from shardtrain.tasks.distillation import Distillation
from shardtrain.utils.errors import CheckpointError, ConfigError

pytest.importorskip("transformers")


@functools.cache
def teacher(family: str = "qwen3", seed: int = 0, **fields: Any) -> Path:
    """Return a folder of a teacher, by default with 512 vocabulary rows like the student."""
    place = Path(tempfile.mkdtemp(prefix="shardtrain-tests-")) / family
    return save(build(family, seed, **{"vocab_size": 512, **fields}), place)


def config(
    folder: Path | None = None, task: dict[str, Any] | None = None, **sections: dict[str, Any]
) -> Config:
    run_config = tiny_config(
        **({"job": {"dump_folder": str(folder)}} if folder is not None else {}),
        model={"overrides": {"num_layers": 2}},
        **sections,
    )
    task_options = {
        "name": "distillation",
        "teacher_path": str(teacher()),
        "temperature": 2.0,
        **(task or {}),
    }
    return dataclasses.replace(run_config, task=Task(**task_options))


MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp 2": (2, {"tensor_parallel_degree": 2}, {}),
    "dp_shard 2": (2, {"data_parallel_shard_degree": 2}, {}),
    "cp 2": (2, {"context_parallel_degree": 2}, {}),
    "tp 2, unsharded logits": (2, {"tensor_parallel_degree": 2, "disable_loss_parallel": True}, {}),
    "dp_replicate 2, split states": (
        2,
        {"data_parallel_replicate_degree": 2, "shard_optimizer_states": True},
        {},
    ),
    "dp_shard 2 x tp 2": (4, {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2}, {}),
}


@functools.cache
def one_process() -> Any:
    return run_tiny(1, config(training={"local_batch_size": 8}), 4)[0]


@pytest.mark.parametrize("mesh", cases(list(MESHES)[:3], nightly=list(MESHES)[3:]))
def test_meshes_change_no_number(mesh: str) -> None:
    ranks, parallelism, training = MESHES[mesh]
    for result in run_tiny(ranks, config(parallelism=parallelism, training=training), 4):
        assert_same_numbers(result, one_process())


SMALL = {"vocab_size": 512, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
         "num_experts": 4, "top_k": 2, "moe_ffn_dim": 16}  # fmt: skip


@pytest.mark.nightly(by="tests/tasks/test_distillation.py::test_meshes_change_no_number")
@pytest.mark.parametrize(
    ("model", "folder", "parallelism"),
    [
        ({"name": "qwen3_moe", "flavor": "debugmodel_moe"}, "qwen3", {"expert_parallel_degree": 2}),
        (
            {"name": "qwen3_moe", "flavor": "debugmodel_moe"},
            "mixtral",
            {"expert_parallel_degree": 2},
        ),
        ({}, "deepseek_v3", {"tensor_parallel_degree": 2}),
    ],
)
def test_experts_on_either_side_change_no_number(
    model: dict[str, Any], folder: str, parallelism: dict[str, Any]
) -> None:
    run_config = config(task={"teacher_path": str(teacher(folder))})
    if model:
        run_config = dataclasses.replace(
            run_config, model=dataclasses.replace(run_config.model, **model, overrides=SMALL)
        )
    expected = run_tiny(1, run_config, 2)[0]
    on_ranks = dataclasses.replace(
        run_config, parallelism=dataclasses.replace(run_config.parallelism, **parallelism)
    )

    assert not check(Loaded(on_ranks)), check(Loaded(on_ranks))
    for result in run_tiny(2, on_ranks, 2):
        assert_same_numbers(result, expected)


def train(config: Config, ranks: int = 1, stop_after: int | None = None) -> Ended:
    ended: Ended = run_ranks(ranks, train_whole, config, stop_after)[0]
    return ended


def test_resumed_run_requires_its_original_teacher(tmp_path: Path) -> None:
    moved = save(build("qwen3", vocab_size=512), tmp_path / "copy")
    checkpoint = {"enable": True, "interval": 2}
    steps = {"steps": 4}
    uninterrupted = train(config(tmp_path / "uninterrupted", checkpoint=checkpoint, training=steps))
    parted = config(tmp_path / "parted", checkpoint=checkpoint, training=steps)
    train(parted, stop_after=2)
    same = dataclasses.replace(
        parted, task=dataclasses.replace(parted.task, teacher_path=str(moved))
    )
    resumed = train(same)  # the same teacher in a different folder

    assert resumed.error is None, resumed.error
    assert resumed.losses == uninterrupted.losses[2:]
    assert_bitwise(resumed.weights, uninterrupted.weights)

    other_teacher = config(
        tmp_path / "parted",
        {"teacher_path": str(teacher(seed=1))},
        checkpoint=checkpoint,
        training={"steps": 6},
    )
    refused = train(other_teacher)

    assert isinstance(refused.error, ConfigError)
    assert "teacher differ" in str(refused.error)


def test_bfloat16_teacher_has_the_numbers_of_a_float32_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """With computation in bfloat16, casting the teacher once equals casting its weights in each pass."""
    run_config = config(training={"mixed_precision_param": "bfloat16"})
    half = run_tiny(1, run_config, 2)[0]
    whole_config = Distillation.teacher

    def in_float32(task: Distillation) -> Config:
        teacher = whole_config(task)
        assert teacher.training.dtype == "bfloat16"
        return dataclasses.replace(
            teacher, training=dataclasses.replace(teacher.training, dtype="float32")
        )

    monkeypatch.setattr(Distillation, "teacher", in_float32)

    assert run_tiny(1, run_config, 2)[0].losses == half.losses


def test_validation_measures_only_the_student_and_steps_log_both_losses(tmp_path: Path) -> None:
    from tiny import text_file

    validation = {
        "enable": True, "freq": 2, "dataset": "text", "dataset_path": text_file(), "seq_len": 64, "steps": 2,
        "local_batch_size": 2,
    }  # fmt: skip
    run_config = config(tmp_path, {"kd_ratio": 0.25}, training={"steps": 2}, validation=validation)

    assert train(run_config, ranks=2).error is None

    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        mixed = 0.75 * step["cross_entropy"] + 0.25 * 4 * step["divergence"]
        assert step["loss"] == pytest.approx(mixed, rel=1e-5)
        assert step["divergence"] > 0.01
    logged = json.loads((tmp_path / "validation.jsonl").read_text().splitlines()[-1])

    # near log 512 = 6.24 for random weights, unlike the mixed loss
    assert logged["loss"] == pytest.approx(steps[-1]["cross_entropy"], abs=1.0)
    assert abs(logged["loss"] - steps[-1]["loss"]) > abs(
        logged["loss"] - steps[-1]["cross_entropy"]
    )
    assert logged["perplexity"] == pytest.approx(
        torch.tensor(logged["loss"]).exp().item(), rel=1e-4
    )


def test_student_learns_from_its_teacher(tmp_path: Path) -> None:
    """Train only on the teacher's distribution over unrelated rows. The divergence must decrease."""
    run_config = config(tmp_path, {"kd_ratio": 1.0, "temperature": 1.0}, training={"steps": 12})
    assert train(run_config).error is None
    divergences = [
        json.loads(line)["divergence"]
        for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert divergences[-1] < 0.75 * divergences[0]


def test_teacher_may_have_an_architecture_only_in_transformers(tmp_path: Path) -> None:
    import transformers

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 128}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(
        tmp_path / "gpt2"
    )
    ended = train(
        config(tmp_path / "run", {"teacher_path": str(tmp_path / "gpt2")}, training={"steps": 2})
    )

    assert ended.error is None, ended.error
    assert ended.losses[-1] < ended.losses[0]


def test_adapters_learn_from_a_teacher(tmp_path: Path) -> None:
    run_config = config(
        tmp_path,
        training={"steps": 4},
        lora={"enable": True, "rank": 4, "random_base": True},
        checkpoint={"enable": True},
    )
    ended = train(run_config)

    assert ended.error is None, ended.error
    assert ended.losses[-1] < ended.losses[0]


def problems_of(broken: Config) -> list[str]:
    return [str(problem) for problem in check(Loaded(broken))]


def test_invalid_distillation_options_are_rejected(tmp_path: Path) -> None:
    valid = config()
    assert not problems_of(valid)

    (tmp_path / "empty").mkdir()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd/config.json").write_text('{"model_type": "martian"}')
    cases = [
        ({"teacher_path": ""}, {}, "must name the Hugging Face folder of the teacher"),
        ({"teacher_path": str(tmp_path / "empty")}, {}, "has no config.json"),
        ({"teacher_path": str(tmp_path / "odd")}, {}, "neither this package nor transformers has"),
        ({"kd_ratio": 0.0}, {}, "task.kd_ratio=0.0 must be above 0 and at most 1"),
        ({"temperature": 0.0}, {}, "task.temperature=0.0 must be above 0"),
        ({"divergence": "jsd", "jsd_beta": 1.0}, {}, "must be between 0 and 1"),
        ({"jsd_beta": 0.2}, {}, 'has no effect with task.divergence = "forward_kl"'),
        ({}, {"pipeline_parallel_degree": 2}, "splits the model"),
        ({"teacher_path": str(teacher(num_attention_heads=2, num_key_value_heads=1))}, {"tensor_parallel_degree": 2},
         "KV heads of model qwen3"),
        ({"teacher_path": str(teacher(vocab_size=640))}, {"tensor_parallel_degree": 2},
         "has 640 rows of its vocabulary and the model 512"),
    ]  # fmt: skip
    for task_options, degrees, expected in cases:
        task = dataclasses.replace(valid.task, **task_options)
        parallelism = Parallelism(**degrees)
        problems = problems_of(dataclasses.replace(valid, task=task, parallelism=parallelism))
        assert any(expected in line for line in problems), (expected, problems)
        assert all("\n" not in line for line in problems)

    # Another task does not read the option.
    task = Task(name="preference", teacher_path=str(teacher()))
    loaded = Loaded(dataclasses.replace(valid, task=task), {"task.teacher_path": "command line"})
    problems = [str(problem) for problem in check(loaded)]
    assert any('is only read by task.name = "distillation"' in line for line in problems), problems


def test_different_vocabularies_are_rejected(tmp_path: Path) -> None:
    """Every token of the student must have the same id in the teacher. Extra tokens and different files are allowed."""
    special_tokens = ("<s>", "</s>", "<pad>")
    for name in ("original", "reformatted", "extended", "swapped"):
        bpe_folder(tmp_path / name, special_tokens, bos_token="<s>")
        save(build("qwen3", vocab_size=512), tmp_path / name)

    # The same tokens in another file.
    file = tmp_path / "reformatted/tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()), indent=1))

    # One more token, after all others.
    file = tmp_path / "extended/tokenizer.json"
    extended = json.loads(file.read_text())
    extra = {"id": len(extended["model"]["vocab"]), "content": "<extra>"}
    extended["added_tokens"].append({**extended["added_tokens"][0], **extra})
    file.write_text(json.dumps(extended))

    # Two tokens with swapped ids.
    file = tmp_path / "swapped/tokenizer.json"
    swapped = json.loads(file.read_text())
    vocab = swapped["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(swapped))

    def problems(student: str, teacher: str) -> list[str]:
        run_config = config(task={"teacher_path": str(tmp_path / teacher)})
        assets = student if student == "bytes" else str(tmp_path / student)
        model = dataclasses.replace(run_config.model, hf_assets_path=assets)
        return problems_of(dataclasses.replace(run_config, model=model))

    assert not problems("original", "original")
    assert not problems("original", "reformatted")
    assert not problems("original", "extended")

    (problem,) = problems("original", "swapped")
    assert "has another vocabulary than" in problem
    assert "id 40 is" in problem

    (problem,) = problems("extended", "original")
    assert "'<extra>' here and nothing there" in problem

    (problem,) = problems("bytes", "original")
    assert "ids are bytes in this run" in problem


def test_teacher_with_too_few_rows_or_damaged_weights_is_rejected(tmp_path: Path) -> None:
    few = train(config(tmp_path / "few", {"teacher_path": str(teacher(vocab_size=128))}))
    assert isinstance(few.error, ConfigError)
    assert "has rows for 128 ids" in str(few.error)

    place = save(build("qwen3", vocab_size=512), tmp_path / "cut")
    file = place / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    cut = train(config(tmp_path / "run", {"teacher_path": str(place)}))

    assert isinstance(cut.error, CheckpointError)
    assert "is truncated" in str(cut.error)


def test_packed_documents_are_masked_in_both_models_or_rejected(tmp_path: Path) -> None:
    import transformers

    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": "a b", "completion": f" {i}"}) + "\n" for i in range(40))
    )
    data = {"format": "prompt_completion", "packing": "first_fit"}
    training = {"dataset": "jsonl", "dataset_path": str(rows), "steps": 2, "on_data_end": "repeat"}

    assert train(config(tmp_path / "apart", data=data, training=training)).error is None

    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 128}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(
        tmp_path / "gpt2"
    )
    broken = config(
        tmp_path / "run", {"teacher_path": str(tmp_path / "gpt2")}, data=data, training=training
    )

    assert train(broken).error is None  # GPT-2 supports restarting positions

    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 64,
        "vocab_size": 512,
    }
    config_of = transformers.OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=128)
    transformers.OPTForCausalLM(config_of).save_pretrained(tmp_path / "opt")
    ended = train(
        config(
            tmp_path / "other",
            {"teacher_path": str(tmp_path / "opt")},
            data=data,
            training=training,
        )
    )

    assert isinstance(ended.error, ConfigError)
    assert "is ignored by OPTForCausalLM" in str(ended.error)
