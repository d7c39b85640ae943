"""Verify detects the situations of public reports of silent faults.

``public_reports.py`` lists the reports, with the test file that plants each situation. This file plants new ones.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tiers import cases
from tools.verify import test_faults, test_precision
from tools.verify.public_faults.public_reports import ENGINE, HERE, PRECISION, REPORTS
from tools.verify.test_faults import Fault, forget_axis, wrap
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

from shardtrain.distributed import grad_clip, pipeline_parallel, runner
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.context_parallel import ulysses
from shardtrain.distributed.tensor_parallel import plan as tensor_parallel
from shardtrain.distributed.tensor_parallel.split_vocabulary import SplitVocabulary
from shardtrain.distributed.tensor_parallel.styles import SplitEmbedding
from shardtrain.models import layers, llama
from shardtrain.ops import init_weights
from shardtrain.ops.dtensor import local_tensor
from shardtrain.ops.split_cross_entropy import SplitCrossEntropySum
from shardtrain.ops.targets import IGNORE
from shardtrain.tools.verify.verify_report import MeshResult

PAGE = Path(__file__).parents[4] / "docs/public_faults.md"
UNNAMED = (
    "no simple cause fits",
    "only the gradient norm differs",
    "only the reported loss differs",
)
"""Starts of causes that name neither a module nor a cause."""
PLACES = (
    "the forward pass first differs",
    "the backward pass first differs",
    "the logits agree",
)
"""Starts of causes that only name a module."""
LEAST_SHARE = 0.8
"""Share of the reports whose module and cause must be named."""
FAULTS: dict[str, Fault] = {}
BENCHES = {
    **test_faults.BENCHES,
    "four ranks": (("--model.overrides.num_kv_heads=8",), ("dp_replicate=2,tp=2",)),
    "smoothing": (("--training.label_smoothing=0.1",), ("tp=2",)),
    "tied": (("--model.overrides.tied_embeddings=true",), ("dp_shard=2",)),
    "gpt_oss": (("--model.name=gpt_oss",), ("tp=2",)),
    "qwen3_moe": (
        ("--model.name=qwen3_moe", "--model.flavor=debugmodel_moe"),
        ("dp_shard=2", "ep=2", "tp=2"),
    ),
}


def fault(
    mesh: str, *answer: str, model: str = "llama3", by_default: bool = False, **options: Any
) -> Any:
    """Register a function that plants a fault, under its name."""

    def register(plant: Any) -> Any:
        FAULTS[plant.__name__.replace("_", " ")] = Fault(
            plant, mesh, answer, by_default, options, model
        )
        return plant

    return register


def replaced(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` with the gradient of ``x``."""
    return x + (value - x).detach()


def of_rank(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the tensor of another rank, of equal shape (a collective)."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach().contiguous())
    return parts[rank]


# loss


@fault("tp=2", "loss", model="smoothing")
def smoothing_over_the_columns_of_each_rank(monkeypatch):
    def gather(gathered, self, values):
        parts = gathered(self, values)
        if values.size(0) == 4:
            parts[:, 3] = values[3]
        return parts

    wrap(monkeypatch, SplitVocabulary, "gather", gather)


@fault("tp=2", "logits counted 2 times over tp")
def logits_counted_once_per_rank(monkeypatch):
    def gather(gathered, self, values):
        parts = gathered(self, values)
        parts[:, 1] *= 2
        return parts

    wrap(monkeypatch, SplitVocabulary, "gather", gather)


@fault("cp=2", "divided by its own count of target tokens")
def each_part_divides_by_its_own_count(monkeypatch):
    def loss(run, self, batch, weight):
        _, targets, _ = self._cut(batch)
        count = (targets != IGNORE).sum().clamp_min(1)
        return run(self, batch, weight * batch.num_targets / (2 * count))

    wrap(monkeypatch, runner.PlainRunner, "_loss", loss)


@fault("cp=2", "targets of another part of the sequence")
def targets_of_another_part_of_the_sequence(monkeypatch):
    def cut(original, batch, mesh, config):
        tokens, targets, positions = original(batch, mesh, config)
        return tokens, of_rank(targets, 1 - mesh.rank("cp")), positions

    wrap(monkeypatch, context_parallel, "cut", cut)


@fault("pp=2", "step 1: the first gradient that differs", "target tokens")
def pipeline_gradients_not_divided(monkeypatch):
    def undivided(run, self, batches, weight):
        return run(self, batches, torch.ones_like(weight)) * weight

    wrap(monkeypatch, pipeline_parallel.PipelineRunner, "forward_backward", undivided)


@fault("tp=2", "the reported loss is scaled by 0.5", by_default=True)
def the_reported_loss_halved(monkeypatch):
    wrap(
        monkeypatch,
        runner.PlainRunner,
        "forward_backward",
        lambda f, self, b, weight: f(self, b, weight) / 2,
    )


@fault("tp=2", "no gradient for the part of head.weight on rank 1")
def columns_of_one_rank_without_gradient(monkeypatch):
    backward = SplitCrossEntropySum.backward

    def without(ctx, *gradients):
        first, *others = backward(ctx, *gradients)
        return first * (dist.get_rank() == 0), *others

    monkeypatch.setattr(SplitCrossEntropySum, "backward", staticmethod(without))


# recomputation


def change_recomputed_input(monkeypatch, change):
    def forward(original, self, x, *others):
        # a graph task runs only while backward recomputes
        if torch._C._current_graph_task_id() != -1:
            x = replaced(x, change(x))
        return original(self, x, *others)

    wrap(monkeypatch, llama.LlamaBlock, "forward", forward)


@fault(
    "dp_shard=2",
    "recomputation: backward uses another input",
    "module layers.1.ffn",
    recompute="full",
)
def recomputation_of_another_replica(monkeypatch):
    change_recomputed_input(monkeypatch, lambda x: of_rank(x, 1 - dist.get_rank()))


@fault(
    "dp_shard=2",
    "recomputation: backward uses another input",
    "module layers.1.ffn",
    recompute="full",
)
def recomputation_from_a_changed_input(monkeypatch):
    change_recomputed_input(monkeypatch, lambda x: x * 1.1)


# groups


class SummedOverReplicas(RowwiseParallel):
    """A rowwise linear that sums over replicas instead of tensor-parallel ranks."""

    @staticmethod
    def _prepare_output_fn(output_layouts, use_local_output, module, outputs, mesh):
        partial = outputs.to_local()
        rank = dist.get_rank()
        # ranks 0 and 2, and 1 and 3, are replicas
        total = partial.detach() + of_rank(partial, (rank + 2) % 4)
        return (
            replaced(partial, total).chunk(mesh.size(), dim=1)[mesh.get_local_rank()].contiguous()
        )


@fault("dp_replicate=2,tp=2", "first differs", "layers.0.attn.wo", model="four ranks")
def a_projection_summed_over_the_wrong_group(monkeypatch):
    def style(make, path, module, name, splitting):
        if name == "rowwise":
            return SummedOverReplicas()
        return make(path, module, name, splitting)

    wrap(monkeypatch, tensor_parallel, "style_for", style)


@fault("tp=2", "the forward pass first differs on rank 1 in module embed")
def embeddings_of_the_first_part_on_all_ranks(monkeypatch):
    def hook(_module, _inputs, output):
        return replaced(output, of_rank(output, 0))

    def apply(original, self, module, device_mesh):
        module = original(self, module, device_mesh)
        module.register_forward_hook(hook)
        return module

    wrap(monkeypatch, SplitEmbedding, "_apply", apply)


# gradients, norm and weights


@fault(
    "tp=2",
    "norm not reduced over tp for tensors of one dimension",
    "attention sinks",
    model="gpt_oss",
)
def attention_sinks_missing_in_the_norm(monkeypatch):
    split_axes = grad_clip.split_axes
    with monkeypatch.context() as patch:
        forget_axis(patch, "tp")
        without_tp = grad_clip.split_axes

    def forget_vectors(gradient):
        return without_tp(gradient) if gradient.ndim == 1 else split_axes(gradient)

    monkeypatch.setattr(grad_clip, "split_axes", forget_vectors)


@fault("dp_shard=2", "embed.weight", model="tied")
def a_tied_head_without_gradient(monkeypatch):
    def forward(original, self, x):
        # not in the diagnosis, which computes expected gradients without a process group
        if self.out_features == 128 and dist.is_initialized():
            return nn.functional.linear(x, self.weight.detach())
        return original(self, x)

    wrap(monkeypatch, nn.Linear, "forward", forward)


@fault("tp=2", "router.gate.weight", "missing reduction over tp", model="qwen3_moe")
def gradients_of_routers_not_reduced(monkeypatch):
    def style(make, path, module, name, splitting):
        if name == "router":
            return tensor_parallel.ReplicatedWeights(Replicate())
        return make(path, module, name, splitting)

    wrap(monkeypatch, tensor_parallel, "style_for", style)


@fault("tp=2", "the backward pass first differs", "module layers.")
def the_gradient_through_queries_lost(monkeypatch):
    def forward(original, self, x, *others):
        queries = self.wq.forward
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.wq, "forward", lambda x: queries(x.detach()))
            return original(self, x, *others)

    wrap(monkeypatch, layers.Attention, "forward", forward)


@fault("pp=2", "before step 1", "initial weights depend on the mesh")
def weights_keyed_by_the_number_in_the_stage(monkeypatch):
    def draw(original, parameter, name, how, seed):
        if dist.get_rank() == 1:
            name = name.replace("layers.1.", "layers.0.")
        return original(parameter, name, how, seed)

    wrap(monkeypatch, init_weights, "draw_", draw)


@fault("ep=2", "scaled by 2", "layers.0.moe.experts", model="qwen3_moe")
def expert_gradients_multiplied_by_ep(monkeypatch):
    def multiply(norm, parameters, mesh):
        parameters = list(parameters)
        with torch.no_grad():
            for parameter in parameters:
                if parameter.ndim == 3:
                    local_tensor(parameter.grad).mul_(2.0)
        return norm(parameters, mesh)

    wrap(monkeypatch, grad_clip, "gradient_norm", multiply)


@fault(
    "cp=2", "attention over the parts of cp loses", "attn.core", context_parallel_method="ulysses"
)
def no_gradient_through_the_exchange_of_heads(monkeypatch):
    def backward(ctx, gradient):
        return torch.zeros_like(ulysses._tokens_for_heads(gradient, ctx.group)), None

    monkeypatch.setattr(ulysses._HeadsForTokens, "backward", staticmethod(backward))


@pytest.fixture(scope="module")
def benches(make_bench):
    """Function that returns the bench of a model, created on first use."""
    benches: dict[str, Any] = {}

    def get(model):
        if model not in benches:
            arguments, meshes = BENCHES[model]
            benches[model] = bench = make_bench(meshes, *arguments)
            bench.shake()
        return benches[model]

    return get


REPORTED = {report.fault: report for report in REPORTS}
"""Faults of the reports, also those that other test files plant."""
BY_DEFAULT = [name for name, planted in FAULTS.items() if planted.by_default]
DETECTED = "detected"
LEVELS = {
    "smoothing over the columns of each rank": DETECTED,
    "a tied head without gradient": DETECTED,
    "a float8 scale of each shard": DETECTED,
    "embeddings of the first part on all ranks": "module",
    "a projection summed over the wrong group": "module",
    "the gradient through queries lost": "module",
}
"""Faults of which less than module and cause is named."""


def level_of(row: MeshResult) -> str:
    """Return "cause" if the answer names module and cause, "module" if only the module, else "detected"."""
    if row.verdict != "differs" or row.cause.startswith(UNNAMED):
        return DETECTED
    return "module" if row.cause.startswith(PLACES) else "cause"


def planted_for(name: str) -> Any:
    """Return the planted fault of a report."""
    tables = {HERE: FAULTS, ENGINE: test_faults.FAULTS, PRECISION: test_precision.FAULTS}
    return tables[REPORTED[name].file][name]


@pytest.mark.parametrize(
    "name", cases(BY_DEFAULT, [name for name in REPORTED if name not in BY_DEFAULT])
)
def test_the_situation_of_a_public_report_is_detected_and_named(
    name, benches, monkeypatch, tmp_path
):
    planted = planted_for(name)
    if REPORTED[name].file == PRECISION:
        planted.plant(monkeypatch)
        row = test_precision.rows_of(tmp_path, planted.options, planted.mesh, steps=planted.steps)[
            planted.row
        ]
    else:
        bench = benches(planted.model)
        planted.plant(monkeypatch)
        row = bench.run(planted.mesh, **planted.options)
    level = level_of(row)
    print(f"\n{name:50} {planted.mesh:26} {level:9} {row.first}; {row.cause}")

    assert row.verdict == "differs", row

    answer = f"{row.first}; {row.cause}"
    for text in planted.answer:
        assert text in answer
    assert level == LEVELS.get(name, "cause"), answer


def test_the_share_of_named_reports():
    """The test above compares the level of each fault with ``LEVELS``, so counting that table counts the answers."""
    assert LEVELS.keys() <= REPORTED.keys()
    assert {report.fault for report in REPORTS if report.file == HERE} == FAULTS.keys()
    levels = Counter(LEVELS.get(report.fault, "cause") for report in REPORTS)
    text = ", ".join(f"{count} {level}" for level, count in levels.items())
    print(f"\n{len(REPORTS)} reports: {text}")

    assert levels["cause"] >= LEAST_SHARE * len(REPORTS), text


NAMED = {"cause": "module and cause", "module": "module", DETECTED: "no"}


def table() -> str:
    """Return the table of the documentation."""
    lines = ["| Report | Situation | Mesh | Named |", "|---|---|---|---|"]
    for report in REPORTS:
        mesh = planted_for(report.fault).mesh
        named = NAMED[LEVELS.get(report.fault, "cause")]
        lines.append(
            f"| [{report.name}]({report.link}) | {report.situation} | `{mesh}` | {named} |"
        )
    return "\n".join(lines)


def test_the_documentation_lists_the_reports():
    assert table() in PAGE.read_text(), table()
