"""Networks of ``transformers`` on split sequences: loss and gradients are those of ``transformers`` on one process."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_architectures import ARCHITECTURES, hf_folder, installed
from ranks import run_ranks
from tiers import cases
from tiny import make_run, tiny_config
from torch import Tensor
from torch.nn import functional as F

from shardtrain import models
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Config
from shardtrain.distributed.context_parallel import cores
from shardtrain.ops import attention_interface
from shardtrain.ops.dtensor import to_full
from shardtrain.train import document_isolation, split_sequences, trainer
from shardtrain.train.preflight import meta_model
from shardtrain.train.resume import resume
from shardtrain.utils.errors import ConfigError

pytest.importorskip("transformers")

WAYS: dict[str, dict[str, Any]] = {
    "gather": {},
    "ring": {"context_parallel_rotate_method": "alltoall"},
    "ulysses": {"context_parallel_method": "ulysses"},
    "ring, in order": {
        "context_parallel_rotate_method": "alltoall",
        "context_parallel_load_balancer": "none",
    },
}
REJECTED = {
    "falcon": "mixes tokens outside of the attention function with matmul in hf.transformer.h.0.self_attention",
    "deepseek_v32": "reads or changes its attention mask in hf.model.layers.0.self_attn",
    "qwen3_next": "mixes tokens outside of the attention function with conv1d in hf.model.layers.0.linear_attn",
    "qwen3_5": "mixes tokens outside of the attention function with conv1d in hf.model.layers.0.linear_attn",
    "qwen3_5_moe": "mixes tokens outside of the attention function with conv1d in hf.model.layers.0.linear_attn",
    "kimi_linear": "mixes tokens outside of the attention function with conv1d in hf.model.layers.0.self_attn",
    "minimax": "mixes tokens outside of the attention function with matmul in hf.model.layers.0.self_attn",
    "bamba": "mixes tokens outside of the attention function with conv1d in hf.model.layers.0.mamba",
    "nemotron_h": "mixes tokens outside of the attention function with conv1d in hf.model.layers.0.mixer",
    "lfm2": "mixes tokens outside of the attention function with conv1d in hf.model.layers.0.conv",
}
REJECTED_FIRST = ["falcon", "deepseek_v32", "qwen3_next"]
SPLIT = [name for name in ARCHITECTURES if name not in REJECTED]
FIRST = ["gpt_oss", "deepseek_v3"]
"""Sinks, windows and experts; values narrower than keys. Other tests have soft caps and learned positions."""

Step = tuple[float, dict[str, Tensor], dict[int, tuple[Tensor, ...]]]


def network(
    name: str, output: Path, documents: bool, changes: dict[str, Any], **sections: Any
) -> Config:
    """Return the configuration of two rows of 64 tokens per step, from the weights of a tiny folder."""
    folder = str(hf_folder(name, **changes))
    training: dict[str, Any] = {
        "seq_len": 64,
        "local_batch_size": 1,
        "global_batch_size": 2,
        "max_norm": 1e9,
    }
    data = {}
    if documents:
        training |= {"dataset": "jsonl", "dataset_path": str(output / "rows.jsonl")}
        data = {"packing": "first_fit"}
        write_documents(output / "rows.jsonl")
    config = tiny_config(
        **{
            "job": {"dump_folder": str(output)},
            "checkpoint": {"enable": True, "initial_load_path": folder, "initial_load_in_hf": True},
            "data": data,
            **sections,
            "training": {**training, **sections.get("training", {})},
        }
    )
    model = dataclasses.replace(
        config.model, name="transformers", flavor="folder", overrides={"path": folder}
    )
    return dataclasses.replace(config, model=model)


def write_documents(file: Path) -> None:
    """Write documents of one to 60 bytes. Some rows then have many documents and some have few."""
    lengths = random.Random(0).choices((1, 1, 2, 5, 9, 20, 33, 60), k=60)
    rows = [
        {"text": (str(index) + " one two three four five six seven" * 2)[:length]}
        for index, length in enumerate(lengths)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def steps(rank: int, configs: Sequence[Config]) -> list[Step]:
    """Return loss, full gradients and this rank's rows of the first step of each configuration."""
    return [first_step(rank, config) for config in configs]


def first_step(rank: int, config: Config) -> Step:
    run = make_run(rank, config)
    checkpoints = Checkpoints(config)
    resume(run, checkpoints)
    checkpoints.close()
    rows: dict[int, tuple[Tensor, ...]] = {}
    gradients: dict[str, Tensor] = {}
    forward_backward = run.runner.forward_backward
    update = run.runner.update

    def remember_rows(batches: Any, weight: Tensor) -> Tensor:
        for batch in batches:
            documents_BT = batch.documents_BT
            if documents_BT is None:
                documents_BT = torch.zeros_like(batch.tokens_BT)
            for place, sample in enumerate(batch.sample_ids_B.tolist()):
                rows[sample] = (
                    batch.tokens_BT[place],
                    batch.targets_BT[place],
                    documents_BT[place],
                )
        return forward_backward(batches, weight)

    def keep_gradients(optimizer: torch.optim.Optimizer) -> None:
        for name, parameter in run.runner.parameters().items():
            if parameter.grad is not None:
                gradients[name] = to_full(parameter.grad).clone()
        update(optimizer)

    run.runner.forward_backward = remember_rows  # type: ignore[method-assign]
    run.runner.update = keep_gradients  # type: ignore[method-assign]
    outcome = trainer.step(run)
    assert outcome is not None
    axes = ("pp", "dp_replicate", "dp_shard", "cp")
    loss = run.mesh.sum(outcome.loss_sum.double(), over=axes).item()
    return loss / outcome.global_tokens, gradients, rows


def transformers_step(
    _: int, name: str, changes: dict[str, Any], rows: dict[int, tuple[Tensor, ...]]
) -> Step:
    """Return loss and gradients of the same rows, each document on its own, computed only by ``transformers``."""
    import transformers

    network_class = getattr(transformers, ARCHITECTURES[name][0])
    network = network_class.from_pretrained(hf_folder(name, **changes)).eval()
    total = torch.zeros(())
    num_targets = 0
    for tokens_T, targets_T, documents_T in rows.values():
        for document in documents_T.unique():
            tokens_t = tokens_T[documents_T == document]
            targets_t = targets_T[documents_T == document]
            logits_tV = network(input_ids=tokens_t[None]).logits[0]
            loss = F.cross_entropy(logits_tV, targets_t, ignore_index=-100, reduction="sum")
            total = total + loss
            num_targets += int((targets_t != -100).sum())
    (total / num_targets).backward()
    gradients = {f"hf.{n}": p.grad for n, p in network.named_parameters() if p.grad is not None}
    return float(total.detach()) / num_targets, gradients, {}


def assert_same(step: Step, expected: Step, case: str) -> None:
    """Assert equal losses and gradients, within 1e-5 of the loss and of the largest gradient."""
    (loss, gradients, _), (expected_loss, expected_gradients, _) = step, expected
    assert loss == pytest.approx(expected_loss, rel=1e-5), case
    scale = max(float(gradient.abs().max()) for gradient in expected_gradients.values())
    for name, gradient in gradients.items():
        error = float((gradient - expected_gradients[name]).abs().max())
        assert error <= 1e-5 * scale, f"{case}: gradient of {name} is off by {error / scale:.1e}"


def assert_ways(
    name: str, num_ranks: int, ways: Sequence[str], documents: bool, path: Path, **fields: Any
) -> None:
    """Compare a mesh with ``transformers``. ``fields``: sections of the run, or ``changes`` of the folder."""
    changes = fields.pop("changes", {})
    parallelism = {"context_parallel_degree": num_ranks, **fields.pop("parallelism", {})}
    hf_folder(name, **changes)  # created once for all ranks
    configs = []
    for way in ways:
        sections = {**fields, "parallelism": {**parallelism, **WAYS[way]}}
        configs.append(network(name, path, documents, changes, **sections))
    answers = run_ranks(num_ranks, steps, configs)

    # Together, the ranks read two rows, of one document or of several.
    rows: dict[int, tuple[Tensor, ...]] = {}
    parameters: set[str] = set()
    for answer in answers:
        _, gradients, rows_of_rank = answer[0]
        rows |= rows_of_rank
        parameters |= gradients.keys()
    assert len(rows) == 2
    assert any(len(row[2].unique()) > 1 for row in rows.values()) is documents

    expected = run_ranks(1, transformers_step, name, changes, rows)[0]
    assert parameters == expected[1].keys()
    for answer in answers:
        for way, step in zip(ways, answer, strict=True):
            assert_same(step, expected, f"{name}, {way}")


@pytest.mark.parametrize(
    "name", cases(FIRST, nightly=[name for name in SPLIT if name not in FIRST])
)
def test_packed_rows_match_transformers(name: str, tmp_path: Path) -> None:
    if name not in installed():
        pytest.skip("this version of transformers does not have it")
    assert_ways(name, 2, list(WAYS)[:3], True, tmp_path)


@pytest.mark.nightly(
    "packed rows on two ranks",
    by="tests/distributed/context_parallel/test_hf_cores.py::test_packed_rows_match_transformers",
)
@pytest.mark.parametrize("name", cases([], nightly=SPLIT))
def test_long_rows_on_four_ranks_match_transformers(name: str, tmp_path: Path) -> None:
    """The window of 16 tokens is as long as a rank's part of a row, and longer than its chunks."""
    if name not in installed():
        pytest.skip("this version of transformers does not have it")
    assert_ways(name, 4, ["gather", "ring", "ring, in order"], False, tmp_path)


PIPELINE = {
    "pipeline_parallel_degree": 2,
    "pipeline_parallel_schedule": "1F1B",
    "pipeline_parallel_microbatch_size": 1,
}
TOGETHER: dict[str, tuple[int, dict[str, Any]]] = {
    "dp_shard": (4, {}),
    "tp": (4, {"parallelism": {"tensor_parallel_degree": 2}}),
    "pp": (4, {"parallelism": PIPELINE, "training": {"local_batch_size": 2}}),
    "pp and recompute": (
        4,
        {
            "parallelism": PIPELINE,
            "training": {"local_batch_size": 2},
            "activation_checkpoint": {"mode": "full"},
        },
    ),
    "recompute": (2, {"activation_checkpoint": {"mode": "full"}}),
    "op": (2, {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}}),
    "compile": (2, {"compile": {"enable": True, "components": ["model"], "backend": "aot_eager"}}),
    "compile and recompute": (
        2,
        {
            "compile": {"enable": True, "components": ["model"], "backend": "aot_eager"},
            "activation_checkpoint": {"mode": "full"},
        },
    ),
}


MORE = [("gemma3", option) for option in TOGETHER if option != "recompute"] + [
    ("gpt_oss", "tp"),
    ("deepseek_v3", "tp"),
]


@pytest.mark.parametrize(("name", "option"), cases([("gemma3", "recompute")], nightly=MORE))
def test_other_options_change_no_number(name: str, option: str, tmp_path: Path) -> None:
    num_ranks, sections = TOGETHER[option]
    sections = {
        **sections,
        "parallelism": {"context_parallel_degree": 2, **sections.get("parallelism", {})},
    }

    assert_ways(name, num_ranks, ["ring"], True, tmp_path, **sections)


@pytest.mark.parametrize(
    ("seq_len", "window"),
    cases([(36, 5)], nightly=[(36, 1), (36, 2), (44, 40), (36, 200), (4, 3)]),
)
def test_odd_parts_and_any_window_match_transformers(
    seq_len: int, window: int, tmp_path: Path
) -> None:
    changes = {"sliding_window": window}
    training = {"seq_len": seq_len}
    assert_ways(
        "gemma2", 2, ["ring", "ulysses"], seq_len > 4, tmp_path, changes=changes, training=training
    )


def built(name: str, **changes: Any) -> Any:
    module = models.find("transformers")
    return models.build(module, module.Config(str(hf_folder(name, **changes))))


def split(**parallelism: Any) -> Config:
    return tiny_config(
        parallelism={"context_parallel_degree": 2, **parallelism}, training={"seq_len": 64}
    )


@pytest.mark.parametrize(
    "name", cases(REJECTED_FIRST, nightly=[name for name in REJECTED if name not in REJECTED_FIRST])
)
def test_tokens_that_mix_outside_of_attention_are_rejected_by_name(name: str) -> None:
    if name not in installed():
        pytest.skip("this version of transformers does not have it")
    with pytest.raises(ConfigError) as raised:
        cores.check_network(built(name), split())

    text = str(raised.value)
    assert "parallelism.context_parallel_degree=2 splits sequences, and " in text
    assert "\n" not in text
    assert ARCHITECTURES[name][0] in text
    assert REJECTED[name] in text


def test_network_that_counts_its_tokens_is_rejected_by_name(tmp_path: Path) -> None:
    """Llama 4 scales queries by the logarithm of their place, which it counts in each layer without rotary angles."""
    import transformers

    sizes = {
        "vocab_size": 512,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    layers = {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
    hf_config = transformers.Llama4TextConfig(
        **sizes, **layers, attention_chunk_size=16, num_local_experts=4
    )
    hf_config.architectures = ["Llama4ForCausalLM"]
    hf_config.save_pretrained(tmp_path)
    module = models.find("transformers")
    model = models.build(module, module.Config(str(tmp_path)))

    with pytest.raises(
        ConfigError, match="counts its tokens with mul in hf.model.layers.1.self_attn"
    ):
        cores.check_network(model, split())


def test_heads_that_ulysses_cannot_exchange_are_rejected_by_name() -> None:
    cores.check_network(built("llama"), split(context_parallel_method="ulysses"))
    config = split(context_parallel_method="ulysses", context_parallel_degree=4)
    with pytest.raises(
        ConfigError, match="has 2 key-value heads in hf.model.layers.0.self_attn, which 4 ranks"
    ):
        cores.check_network(built("llama"), config)


@pytest.mark.parametrize(("seq_len", "accepted"), [(32, True), (33, False)])
def test_long_rope_is_rejected_where_its_angles_depend_on_a_ranks_tokens(
    seq_len: int, accepted: bool
) -> None:
    model = built("phi3")
    for module in model.modules():
        if hasattr(module, "rope_type"):
            module.rope_type = "longrope"
    model.hf.config.rope_parameters = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
    }
    config = tiny_config(parallelism={"context_parallel_degree": 2}, training={"seq_len": seq_len})
    if accepted:
        assert cores.hf_cores._broken_angles(model, seq_len) is None
        return

    with pytest.raises(
        ConfigError,
        match='angles of type "longrope" in hf.model.rotary_emb, which change beyond 32',
    ):
        cores.check_network(model, config)


def test_rejection_comes_before_ranks_start(tmp_path: Path) -> None:
    """The checks before a run, and ``config check``, build the model with this function."""
    config = network("falcon", tmp_path, False, {}, parallelism={"context_parallel_degree": 2})
    [error], parameters = meta_model.build(config, 2)
    assert REJECTED["falcon"] in str(error)
    assert parameters is None


def test_windows_come_from_the_masks_of_transformers() -> None:
    """The window of a layer comes from its mask, also if the attention function does not receive it."""
    windows = [call.window for call in attention_interface.trace(built("gemma3"), 64).values()]
    assert windows == [16, 0]


def check_messages(rank: int, config: Config, fault: str) -> list[str]:
    """Return the messages of both checks before the first step, with a fault in the network."""
    run = make_run(rank, config)
    checkpoints = Checkpoints(config)
    resume(run, checkpoints)
    checkpoints.close()
    model: Any = run.runner.parts[0]
    forward = model.hf.forward
    if fault == "counts":  # positions of the part instead of those of the sequence
        model.hf.forward = lambda input_ids, position_ids=None: forward(
            input_ids, position_ids=torch.arange(input_ids.size(1))[None]
        )
    messages = []
    for check in (split_sequences.check_run, document_isolation.check_run):
        try:
            check(run)
            messages.append("")
        except ConfigError as error:
            messages.append(str(error))
    return messages


@pytest.mark.parametrize("fault", ["", "counts"])
def test_network_that_counts_its_tokens_is_detected_on_its_mesh(fault: str, tmp_path: Path) -> None:
    config = network("opt", tmp_path, True, {}, parallelism={"context_parallel_degree": 2})
    hf_folder("opt")
    for messages in run_ranks(2, check_messages, config, fault):
        assert ("changes the logits of OPTForCausalLM by" in messages[0]) is bool(fault)
        # OPT's own masks ignore documents, and ours do not
        assert fault or messages[1] == ""
