"""The balance loss of ``transformers`` networks equals that of one process with the whole batch, on any mesh."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_architectures import hf_folder
from hf_meshes import hf_tiny, piped
from ranks import run_ranks
from tiers import cases
from tiny import make_run
from torch import Tensor
from torch.nn import functional as F

from shardtrain import models
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Config
from shardtrain.ops.dtensor import to_full
from shardtrain.ops.targets import FILLER_DOCUMENT, IGNORE
from shardtrain.train import trainer
from shardtrain.train.resume import resume
from shardtrain.utils.errors import ConfigError

pytest.importorskip("transformers")

# Large, so that the loss is a third of the gradient
COEFFICIENT = 0.5
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one process": (1, {}, {}),
    "accumulation": (1, {}, {"training": {"local_batch_size": 1}}),
    "dp": (2, {}, {"training": {"local_batch_size": 2}}),
    "dp, accumulation, recomputation": (
        2,
        {},
        {"training": {"local_batch_size": 1}, "activation_checkpoint": {"mode": "full"}},
    ),
    "recomputation of operations": (
        1,
        {},
        {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}},
    ),
    "tp": (2, {"tensor_parallel_degree": 2}, {}),
    "cp": (2, {"context_parallel_degree": 2}, {}),
    "ep": (2, {"expert_parallel_degree": 2}, {"training": {"local_batch_size": 2}}),
    "ep x tp": (2, {"expert_parallel_degree": 2, "tensor_parallel_degree": 2}, {}),
    "pp": (2, piped(2, "1F1B"), {}),
    "pp ZBV": (2, piped(2, "ZBVZeroBubble"), {}),
    "pp x dp, recomputation": (
        4,
        piped(2, "1F1B"),
        {"training": {"local_batch_size": 2}, "activation_checkpoint": {"mode": "full"}},
    ),
}


def path_of(name: str) -> Path:
    changes = {"output_router_logits": True, "router_aux_loss_coef": COEFFICIENT}
    return hf_folder(name, num_hidden_layers=4, **_layers(name), **changes)


def _layers(name: str) -> dict[str, Any]:
    if name == "gpt_oss":
        return {"layer_types": ("sliding_attention", "full_attention") * 2}
    if name == "qwen3_next":
        return {"layer_types": ("linear_attention", "full_attention") * 2}
    return {}


@dataclasses.dataclass(frozen=True)
class Step:
    """The first step of a rank: its loss with the balance loss, full gradients, and rows by sample."""

    loss: float
    balance_loss: float
    gradients: dict[str, Tensor]
    rows: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]]


def first_step(rank: int, config: Config) -> Step:
    run = make_run(rank, config)
    checkpoints = Checkpoints(config)
    resume(run, checkpoints)
    checkpoints.close()
    rows: dict[int, tuple[Tensor, Tensor, Tensor, Tensor]] = {}
    gradients: dict[str, Tensor] = {}
    work = run.runner.forward_backward
    update = run.runner.update

    def remember(batches: Any, weight: Tensor) -> Tensor:
        for batch in batches:
            documents_BT = batch.documents_BT
            if documents_BT is None:
                documents_BT = torch.zeros_like(batch.tokens_BT)
            columns = (batch.tokens_BT, batch.targets_BT, batch.positions_BT, documents_BT)
            rows.update(zip(batch.sample_ids_B.tolist(), zip(*columns, strict=True), strict=True))
        return work(batches, weight)

    def keep(optimizer: torch.optim.Optimizer) -> None:
        for name, parameter in run.runner.parameters().items():
            if parameter.grad is not None:
                gradients[name] = to_full(parameter.grad).clone()
        update(optimizer)

    run.runner.forward_backward, run.runner.update = remember, keep  # type: ignore[method-assign]
    outcome = trainer.step(run)
    assert outcome is not None
    axes = ("pp", "dp_replicate", "dp_shard", "cp")
    loss = run.mesh.sum(outcome.loss_sum.double(), over=axes).item() / outcome.global_tokens
    balance_loss = run.runner.measures().get("moe_aux_loss", 0.0)
    return Step(loss + balance_loss, balance_loss, gradients, rows)


def transformers_step(
    _: int, path: Path, name: str, rows: dict[int, Any]
) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of all rows in one batch, computed only by ``transformers``."""
    import transformers
    from hf_architectures import ARCHITECTURES

    network = getattr(transformers, ARCHITECTURES[name][0]).from_pretrained(path).eval()
    columns = [torch.stack(column) for column in zip(*rows.values(), strict=True)]
    tokens_BT, targets_BT, positions_BT, documents_BT = columns
    # Without a mask and a cache, transformers finds documents by positions that restart. Padding follows the
    # text, so only the count of the experts needs a mask.
    out = network(input_ids=tokens_BT, position_ids=positions_BT, use_cache=False)
    loss = F.cross_entropy(out.logits.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORE)
    is_text_BT = (documents_BT != FILLER_DOCUMENT).long()
    count = sys.modules[type(network).__module__].load_balancing_loss_func
    sizes = (network.num_experts, network.num_experts_per_tok)
    aux_loss = count(out.router_logits, *sizes, is_text_BT)
    if bool(is_text_BT.all()):
        torch.testing.assert_close(aux_loss, out.aux_loss)
    total = loss + network.router_aux_loss_coef * aux_loss
    total.backward()
    gradients = {}
    for parameter_name, parameter in network.named_parameters():
        if parameter.grad is not None:
            gradients[f"hf.{parameter_name}"] = parameter.grad
    return float(total), gradients


def assert_same(answers: list[Step], name: str, path: Path) -> None:
    """The loss and the gradients of all ranks match transformers, which gets the rows of all ranks."""
    rows: dict[int, Any] = {}
    for answer in answers:
        rows |= answer.rows
    loss, gradients = run_ranks(1, transformers_step, path, name, rows)[0]

    compared: set[str] = set()
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    for answer in answers:
        assert answer.balance_loss > 0.1
        # float32 sums in a different order
        assert abs(answer.loss - loss) <= 1e-5 * loss
        compared |= answer.gradients.keys()
        for parameter, gradient in answer.gradients.items():
            # In transformers 4, an expert without tokens has no gradient.
            expected = gradients.get(parameter, torch.zeros_like(gradient))
            torch.testing.assert_close(gradient, expected, atol=1e-5 * scale, rtol=0, msg=parameter)
    assert compared >= gradients.keys()


@pytest.mark.parametrize("mesh", MESHES)
def test_balance_loss_of_a_mesh_equals_that_of_transformers(mesh: str, tmp_path: Path) -> None:
    ranks, degrees, sections = MESHES[mesh]
    path = path_of("qwen3_moe")
    config = hf_tiny(path, tmp_path, parallelism=degrees, **sections)
    network = build(path)
    if not network.experts and {"tensor_parallel_degree", "expert_parallel_degree"} & set(degrees):
        pytest.skip("this version has no stacked experts, and the mesh is rejected")

    assert_same(run_ranks(ranks, first_step, config), "qwen3_moe", path)


@pytest.mark.parametrize(
    "name",
    cases(["mixtral", "gpt_oss"], nightly=["olmoe", "granitemoe", "ernie4_5_moe", "qwen3_next"]),
)
def test_balance_loss_of_architectures_equals_that_of_transformers(
    name: str, tmp_path: Path
) -> None:
    path = path_of(name)
    config = hf_tiny(path, tmp_path, training={"local_batch_size": 1})
    assert_same(run_ranks(2, first_step, config), name, path)


@pytest.mark.parametrize(("packing", "ranks"), [("first_fit", 2), ("padded", 2)])
def test_padding_and_documents_count_as_in_transformers(
    packing: str, ranks: int, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    texts = ["one two three four " * (1 + index % 3) for index in range(12)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = path_of("qwen3_moe")
    training = {
        "dataset": "jsonl",
        "dataset_path": str(file),
        "seq_len": 64,
        "local_batch_size": 1,
        "steps": 1,
    }
    config = hf_tiny(path, tmp_path / "run", training=training, data={"packing": packing})
    answers = run_ranks(ranks, first_step, config)
    # The case "padded" must have padding, because the load statistics must ignore it.
    if packing == "padded":
        has_padding = False
        for answer in answers:
            for row in answer.rows.values():
                has_padding = has_padding or bool((row[3] == FILLER_DOCUMENT).any())
        assert has_padding

    assert_same(answers, "qwen3_moe", path)


def build(path: Path, **overrides: Any) -> Any:
    module = models.find("transformers")
    fields = {"path": str(path), **overrides}
    return models.build(module, models.shape_of(module, "folder", fields, "rmsnorm"))


def test_option_replaces_the_coefficient_of_the_folder() -> None:
    path = path_of("qwen3_moe")
    assert build(path).balance.coefficient == COEFFICIENT
    assert build(path, balance_loss_coeff=0.25).balance.coefficient == 0.25
    assert build(path, balance_loss_coeff=0.0).balance is None
    assert build(hf_folder("qwen3_moe")).balance is None
    assert build(hf_folder("qwen3_moe"), balance_loss_coeff=0.25).balance.coefficient == 0.25


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama", "LlamaForCausalLM has no balance loss"),
        ("deepseek_v3", "DeepseekV3ForCausalLM has no balance loss"),
    ],
)
def test_balance_loss_without_effect_is_rejected(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        build(hf_folder(name), balance_loss_coeff=0.1)
    assert "model.overrides.balance_loss_coeff=0.1" in str(raised.value)
    with pytest.raises(
        ConfigError, match=f"output_router_logits=true in config.json, and {message}"
    ):
        build(hf_folder(name, output_router_logits=True))
