"""Updates that the device itself skips, tested with the CPU as the device.

On an accelerator, a step launches its update before the host has read loss and norm (``Run.decides_on_device``).
PyTorch's fused kernels read the same flag on a CPU, so such a step can be compared bitwise with a step that the host
decides.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import assert_bitwise, make_run, tiny_config, whole

from shardtrain import optim
from shardtrain.ops.dtensor import to_full
from shardtrain.train import trainer
from shardtrain.train.run import Run
from shardtrain.utils.errors import NumericalError

BIASED_EXPERTS = {
    "name": "mixtral",
    "overrides": {"moe_ffn_dim": 48, "num_experts": 4, "load_balance_coeff": 1e-2},
}
"""All layers have experts, so the ``ffn_dim`` of the tiny run does not apply."""
REPLICAS = {"data_parallel_replicate_degree": 2, "shard_optimizer_states": True}


def steps(rank, config, on_device, spoil, num_steps=3):
    """Return weights, optimizer state, buffers and counters after some steps, and the error that ended them.

    ``spoil`` is the step in which a gradient of the last rank is damaged.
    """
    at, value = spoil
    with pytest.MonkeyPatch.context() as patch:
        decides_on_device = property(
            lambda run: on_device and optim.decides_on_device(run.optimizer)
        )
        patch.setattr(Run, "decides_on_device", decides_on_device)
        run = make_run(rank, config)
        work = run.runner.forward_backward
        error = None
        updates = []
        queued = run.runner.update

        def spoiled(*inputs):
            loss = work(*inputs)
            if run.state.step + 1 == at and rank == torch.distributed.get_world_size() - 1:
                next(iter(run.runner.parameters().values())).grad.mul_(value)
            return loss

        def update(*inputs):
            updates.append(len(inputs))
            queued(*inputs)

        run.runner.forward_backward = spoiled
        run.runner.update = update
        try:
            for _ in range(num_steps):
                trainer.step(run)
        except NumericalError as raised:
            error = str(raised)
        assert set(updates) == {2 if on_device else 1}
        states = optim.state_tensors(run.optimizer, run.runner.optimizer_parameters().items())
        tensors = {
            **whole(run),
            **{name: to_full(tensor.detach()).clone() for name, tensor in states.items()},
        }
        tensors |= {name: buffer.clone() for name, buffer in run.runner.buffers().items()}
        return tensors, run.state.to_dict(), error


def run_on_device_and_host(ranks, config, spoil):
    device, host = (
        run_ranks(ranks, steps, config, on_device, spoil) for on_device in (True, False)
    )
    for (device_weights, device_state, device_error), (host_weights, host_state, host_error) in zip(
        device, host, strict=True
    ):
        assert_bitwise(device_weights, host_weights)
        assert (device_state, device_error) == (host_state, host_error)
    return device


@pytest.mark.parametrize(
    ("ranks", "sections"),
    cases(
        [(1, {"training": {"nonfinite_policy": "skip"}})],
        nightly=[
            (2, {"parallelism": REPLICAS, "training": {"nonfinite_policy": "skip"}}),
            (2, {"model": BIASED_EXPERTS, "training": {"nonfinite_policy": "skip"}}),
            (1, {"training": {"mixed_precision_param": "float16", "initial_loss_scale": 1024.0}}),
            (
                2,
                {
                    "optimizer": {"name": "Adam", "lr": 1e-2},
                    "training": {"nonfinite_policy": "skip"},
                },
            ),
        ],
    ),
)
def test_nonfinite_step_changes_nothing_and_others_are_bitwise_equal_to_the_host(ranks, sections):
    config = tiny_config(**sections)
    if sections.get("model") is BIASED_EXPERTS:  # this model has no ffn_dim
        overrides = dict(config.model.overrides)
        overrides.pop("ffn_dim", None)
        model = dataclasses.replace(config.model, overrides=overrides)
        config = dataclasses.replace(config, model=model)

    (_, state, error), *_ = run_on_device_and_host(ranks, config, spoil=(2, float("nan")))

    assert error is None
    assert (state["step"], state["updates"]) == (3, 2)


def test_run_without_skipping_stops_with_the_weights_before_the_step():
    (tensors, state, error), *_ = run_on_device_and_host(1, tiny_config(), spoil=(2, float("inf")))
    assert "step 2" in error
    assert "the weights are still those of step 1" in error
    assert state["step"] == 1

    (before, *_), *_ = run_ranks(1, steps, tiny_config(), False, (0, 1.0), 1)
    assert_bitwise(tensors, before)


@pytest.mark.nightly(
    "replicas",
    by="tests/train/test_update_on_device.py::test_run_without_skipping_stops_with_the_weights_before_the_step",
)
def test_ranks_with_different_norms_stop_before_the_update():
    replicas = {"data_parallel_replicate_degree": 2}
    (_, state, error), *_ = run_on_device_and_host(
        2, tiny_config(parallelism=replicas), spoil=(2, 2.0)
    )
    assert "gradient norm is" in error
    assert state["step"] == 1
