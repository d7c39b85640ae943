"""Each dimension of a certificate sees its faults, and sound configurations raise no alarm."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from shardtrain import cli
from shardtrain.data.batch import Batch
from shardtrain.data.loader import DataLoader, MicroBatches
from shardtrain.data.packing import fitted, packed_rows
from shardtrain.data.packing.packed_rows import PackedSequences
from shardtrain.data.packing.token_buffer import MemoryTokenBuffer
from shardtrain.data.streaming import stream_pack
from shardtrain.distributed import activation_checkpoint, fsdp, runner
from shardtrain.distributed import compile as compiling
from shardtrain.distributed.multi_token_loss import MultiTokenLoss
from shardtrain.train import validation
from shardtrain.train.step_sums import StepSums

DOCUMENTS = Path(__file__).parents[3] / "fixtures" / "search" / "documents.jsonl"
SMALL = (
    *("--training.dataset", "jsonl", "--training.dataset_path", str(DOCUMENTS)),
    *("--training.seq_len", "32", "--model.overrides.num_layers", "2"),
    *("--training.mixed_precision_param", "float32"),
    *("--parallelism.data_parallel_shard_degree", "1"),
)
DIMENSIONS = ("mesh", "task", "accumulation", "workers", "resume", "recompute", "offload")


@pytest.mark.parametrize("dimension", DIMENSIONS)
def test_a_sound_configuration_holds(check, dimension):
    result = check(dimension)
    assert result.verdict == "holds", result
    assert result.worst.error <= result.worst.tolerance


def test_a_divisor_that_each_rank_counts_itself(check, monkeypatch):
    monkeypatch.setattr(StepSums, "all_reduce", lambda self, _: self)
    result = check("task", meshes=("dp_shard=2",))
    assert result.verdict == "differs", result

    first = result.comparisons[0].first
    assert "gradient of" in first
    assert "in step 1" in first
    assert "the loss of step 1 is divided by" in result.comparisons[0].cause


def gradients_are_averaged(monkeypatch):
    """Divide the gradients by the number of ranks."""
    apply = fsdp.apply

    def average(model, layout, mesh, config):
        apply(model, layout, mesh, config)
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.set_gradient_divide_factor(2.0)

    monkeypatch.setattr(fsdp, "apply", average)


def test_a_forgotten_reduction(check, monkeypatch):
    gradients_are_averaged(monkeypatch)
    for dimension in ("mesh", "task"):
        result = check(dimension, meshes=("dp_shard=2",))
        assert result.verdict == "differs"
        cause = result.comparisons[0].cause
        assert "axis dp_shard" in cause, cause
        assert "averaged where" in cause, cause


def test_a_loss_divided_by_the_targets_of_each_micro_batch(check, monkeypatch):
    forward_backward = runner.PlainRunner.forward_backward

    def mean_of_means(self, batches, weight):
        mean_targets = sum(batch.num_targets for batch in batches) / len(batches)
        loss = 0.0
        for batch in batches:
            weight_of_batch = weight * mean_targets / batch.num_targets
            loss = loss + forward_backward(self, [batch], weight_of_batch)
        return loss

    monkeypatch.setattr(runner.PlainRunner, "forward_backward", mean_of_means)
    result = check("accumulation")

    assert result.verdict == "differs", result
    assert "in step 1" in result.comparisons[0].first, result

    cause = result.comparisons[0].cause
    assert "backward pass first differs in module head: check the divisor" in cause, cause


def test_a_resume_that_skips_a_batch(check, monkeypatch):
    seek = DataLoader.seek

    def skip(self, samples_consumed, cursors=None):
        extra = self.global_batch if samples_consumed else 0
        seek(self, samples_consumed + extra, cursors)

    monkeypatch.setattr(DataLoader, "seek", skip)
    result = check("resume")

    assert result.verdict == "differs", result
    assert "in step 3" in result.comparisons[0].first
    assert "does not continue at its position in the data" in result.comparisons[0].cause


def test_a_resume_that_starts_again(check, monkeypatch):
    from shardtrain.train import trainer

    monkeypatch.setattr(trainer, "resume", lambda run, checkpoints: None)
    result = check("resume")

    assert result.verdict == "failed"
    assert "continued at step 0 instead of 2" in result.comparisons[0].first


def test_a_resume_on_a_mesh_that_differs_itself_names_the_mesh(check, monkeypatch):
    """Without a resume, the same mesh has the same fault, so the checkpoint is not the cause."""
    gradients_are_averaged(monkeypatch)
    result = check("resume")
    on_one_process, on_mesh = result.comparisons
    assert on_one_process.verdict == "same"
    assert on_mesh.verdict == "differs"
    assert "the checkpoint is not the cause" in on_mesh.cause, on_mesh
    assert "dp_shard=2 differs without a resume, too" in on_mesh.cause, on_mesh
    assert "averaged where they must be summed" in on_mesh.cause, on_mesh


def test_a_resume_that_forgets_the_optimizer(check, monkeypatch):
    monkeypatch.setattr("shardtrain.train.run.Run.optimizer_state_dict", lambda self: {})
    result = check("resume")
    assert result.verdict == "differs", result
    assert "weights of" in result.comparisons[0].first, result
    cause = result.comparisons[0].cause
    assert "update of module embed" in cause, cause
    assert "optimizer states" in cause, cause


def test_a_requested_mesh_that_is_impossible_is_not_checked(check):
    result = check("task", meshes=("tp=3",))
    assert result.verdict == "not checked"
    assert not result.holds


IMPOSSIBLE = {
    "only": (("--mesh", "tp=3"), ("mesh", "task")),
    "with a possible one": (("--mesh", "tp=3", "--mesh", "dp_shard=2"), ("mesh", "task")),
    "other dimensions": (("--mesh", "tp=3"), ("task", "accumulation")),
}
"""Requested meshes, one of which is impossible, and dimensions."""


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_accepted_impossible_mesh_is_a_success(name, tmp_path, capsys):
    """The exit status is 0, as without a certificate. But --check rejects a certificate without a comparison."""
    meshes, dimensions = IMPOSSIBLE[name]
    path = tmp_path / "certificate.json"
    command = ["verify", *meshes, "--dimension", *dimensions, "--quick", *SMALL]
    arguments = [*command, "--certificate", str(path)]
    assert cli.main([*arguments, "--allow-impossible"]) == 0, capsys.readouterr()
    document = json.loads(path.read_text())
    verdicts = {one["name"]: one["verdict"] for one in document["dimensions"]}
    is_compared = "holds" in verdicts.values()
    assert document["holds"] == is_compared
    text = capsys.readouterr().out
    assert ("proves nothing, because no requested mesh is possible" in text) != is_compared
    expected = "holds" if name == "with a possible one" else "not possible"
    assert verdicts["task"] == expected
    assert cli.main(["verify", *SMALL, "--check", str(path)]) == (0 if is_compared else 4)
    # Without the flag, the mesh was requested and not compared.
    assert cli.main(arguments) == 4


METRICS = {
    "mtp_loss_1": (
        MultiTokenLoss,
        ("--model.name", "deepseek_v3", "--model.overrides.num_nextn_predict_layers", "1"),
    ),
    "moe_max_load": (
        runner.PlainRunner,
        ("--model.name", "mixtral"),
    ),
}
"""Metric -> class that returns it, and options of a run with it."""


@pytest.mark.parametrize("metric", METRICS)
def test_a_metric_of_one_rank(check, monkeypatch, metric):
    """Gradients are correct, but the reported metric is that of one rank instead of all ranks."""
    owner, options = METRICS[metric]
    measures = owner.measures

    def of_rank(self):
        values = measures(self)
        values[metric] *= 1 + 0.1 * torch.distributed.get_rank()
        return values

    monkeypatch.setattr(owner, "measures", of_rank)
    result = check("task", *options, meshes=("dp_shard=2",))
    (comparison,) = result.comparisons
    assert result.verdict == "differs", result
    assert f"metric of {metric} in step 1" in comparison.first, comparison
    assert f"the metric {metric} does not: check its sum" in comparison.cause, comparison


def test_a_batch_order_that_depends_on_workers(check, monkeypatch):
    read = MicroBatches.__getitem__

    def next_of_worker(self, number):
        worker = torch.utils.data.get_worker_info()
        return read(self, number + (worker.id if worker else 0))

    monkeypatch.setattr(MicroBatches, "__getitem__", next_of_worker)
    result = check("workers")

    assert result.verdict == "differs", result
    assert "in step 1" in result.comparisons[0].first, result
    assert "order of rows depends on worker processes" in result.comparisons[0].cause


PACKED = ("--data.packing", "first_fit")


def test_separate_documents_have_the_loss_of_packed_ones(check):
    result = check("packing", *PACKED)
    assert result.verdict == "holds"
    # float32 sums in a different order
    assert result.worst.error < 2e-6


def test_positions_that_depend_on_the_documents_before(check, monkeypatch):
    make = MicroBatches.make

    def stretched(self, position):
        batch, cursors = make(self, position)
        positions_BT = batch.positions_BT * (1 + batch.documents_BT)
        return dataclasses.replace(batch, positions_BT=positions_BT), cursors

    monkeypatch.setattr(MicroBatches, "make", stretched)

    assert check("packing", *PACKED).verdict == "differs"


def test_attention_between_documents(check, monkeypatch):
    to = Batch.to
    monkeypatch.setattr(
        Batch, "to", lambda self, *a, **b: to(dataclasses.replace(self, documents_BT=None), *a, **b)
    )
    result = check("packing", *PACKED)

    assert result.verdict == "differs", result
    assert "gradient of" in result.comparisons[0].first, result

    cause = result.comparisons[0].cause
    assert "documents affect each other" in cause, cause
    assert "layers.*.attn.core" in cause, cause


CONCATENATED = ("--data.packing", "concat", "--data.document_mask", "on")
STREAMED = ("--data.mode", "stream")


def later_borders(monkeypatch):
    """Make each document after the first start one column late in its row."""
    number = PackedSequences.number_documents

    def late(self, slot, columns):
        number(self, slot, columns + 1)

    monkeypatch.setattr(PackedSequences, "number_documents", late)


def targets_across_borders(monkeypatch):
    """Let the last token of a document have the first token of the next document as its target."""
    write = packed_rows.write_window

    def keep_targets(out, slot, tokens, learned, begins):
        write(out, slot, tokens, learned, begins)
        out.write(slot, 0, tokens, learned)

    monkeypatch.setattr(packed_rows, "write_window", keep_targets)
    monkeypatch.setattr(stream_pack, "write_window", keep_targets)


def starts_of_the_buffer_off_by_one(monkeypatch):
    """Let the buffer of documents return borders that are one token late."""
    starts = MemoryTokenBuffer.starts

    def late(self, start, stop):
        return np.minimum(starts(self, start, stop) + 1, stop - 1)

    monkeypatch.setattr(MemoryTokenBuffer, "starts", late)


BORDER_FAULTS = {
    "late borders of fitted rows": (later_borders, PACKED, "documents start at columns"),
    "late borders of concatenated rows": (
        later_borders,
        CONCATENATED,
        "documents start at columns",
    ),
    "late borders of streamed rows": (
        later_borders,
        (*PACKED, *STREAMED),
        "documents start at columns",
    ),
    "targets in the next document": (targets_across_borders, CONCATENATED, "the target at column"),
    "targets in the next document of a stream": (
        targets_across_borders,
        (*CONCATENATED, *STREAMED),
        "the target at column",
    ),
    "late borders of the buffer": (
        starts_of_the_buffer_off_by_one,
        CONCATENATED,
        "documents start at columns",
    ),
}


@pytest.mark.parametrize("name", BORDER_FAULTS)
def test_a_wrong_border_between_documents(check, monkeypatch, name):
    plant, options, text = BORDER_FAULTS[name]
    plant(monkeypatch)
    result = check("packing", *options)
    (comparison,) = result.comparisons

    assert result.verdict == "differs", result
    assert text in comparison.first, comparison
    assert "data/packing" in comparison.cause, comparison


@pytest.mark.parametrize(
    "options",
    [
        CONCATENATED,
        (*CONCATENATED, *STREAMED),
        (*PACKED, *STREAMED),
        ("--data.packing", "best_fit", "--data.long_documents", "cut"),
        ("--data.packing", "best_fit", "--data.long_documents", "split"),
        ("--data.packing", "first_fit", "--data.format", "prompt_completion"),
    ],
)
def test_sound_packing_holds(check, options):
    result = check("packing", *options)
    assert result.verdict == "holds", result


def test_rows_of_one_document_prove_nothing(check, monkeypatch):
    monkeypatch.setattr(fitted, "first_fit", lambda lengths, _: np.arange(len(lengths)))
    result = check("packing", *PACKED)
    assert result.verdict == "not checked", result
    assert not result.holds, result
    assert "no border was compared" in result.comparisons[0].first


def test_a_named_dimension_that_does_not_apply_is_not_checked(check):
    """Otherwise a certificate of this dimension would hold without a comparison."""
    result = check("packing")
    assert "attend to each other" in result.reason
    assert result.verdict == "not checked"
    assert not result.holds


def perturbed(module, factor):
    """Let each layer return a slightly larger output."""
    for layer in module.layers.values():
        layer.register_forward_hook(lambda _, __, output: output * factor)


def test_a_recomputation_with_another_result(check, monkeypatch):
    apply = activation_checkpoint.apply

    def wrong(module, layout, mesh, config):
        apply(module, layout, mesh, config)
        perturbed(module, 1.001)

    monkeypatch.setattr(activation_checkpoint, "apply", wrong)
    for dimension in ("recompute", "offload"):
        result = check(dimension)
        assert result.verdict == "differs", result
        assert "in step 1" in result.comparisons[0].first, result
        cause = result.comparisons[0].cause
        assert "first differs in the output of module layers.0" in cause, cause


def test_a_recomputation_that_differs_from_the_first_pass(check, monkeypatch):
    """The activation returns another result while the backward pass computes it again."""
    silu = torch.nn.functional.silu

    def changed(x, *arguments, **named):
        is_backward = torch._C._current_graph_task_id() != -1
        return silu(x * 1.001 if is_backward else x, *arguments, **named)

    monkeypatch.setattr(torch.nn.functional, "silu", changed)
    result = check("recompute")

    assert result.verdict == "differs", result

    cause = result.comparisons[0].cause
    assert "the forward pass agrees, and the backward pass first differs in module layers." in cause
    assert "recomputed forward pass" in cause


@pytest.mark.nightly("compiling takes 20 seconds")
def test_compiled_code_with_another_result(check, monkeypatch):
    assert check("compile", "--compile.enable", "true").verdict == "holds"
    apply = compiling.apply

    def wrong(module, layout, mesh, config):
        apply(module, layout, mesh, config)
        perturbed(module, 1.001)

    monkeypatch.setattr(compiling, "apply", wrong)

    assert check("compile", "--compile.enable", "true").verdict == "differs"


VALIDATION = (
    *("--validation.enable", "true", "--validation.dataset", "jsonl"),
    *("--validation.dataset_path", str(DOCUMENTS)),
)


def test_validation_does_not_depend_on_ranks_and_batch_size(check):
    assert check("validation", *VALIDATION).verdict == "holds"
    assert check("validation").reason == "validation.enable=false"


def test_a_validation_mean_of_means(check, monkeypatch):
    evaluate = runner.PlainRunner.evaluate
    monkeypatch.setattr(
        runner.PlainRunner,
        "evaluate",
        lambda self, batch: evaluate(self, batch) / max(1, batch.num_targets),
    )
    result = check("validation", *VALIDATION)

    assert result.verdict == "differs", result
    assert "validation of loss in step 3" in result.comparisons[0].first, result


def test_validation_rows_that_only_one_rank_counts(check, monkeypatch):
    monkeypatch.setattr(validation, "BATCH_AXES", ())
    result = check("validation", *VALIDATION)
    assert result.comparisons[0].verdict == "same", result
    assert result.comparisons[1].verdict == "differs", result
