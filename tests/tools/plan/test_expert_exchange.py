"""The planned time of experts depends on the router balance, and on exchanges overlapped with computation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardtrain import config
from shardtrain.tools.plan import hardware, job_sizes, layer_timing, shapes, timing

DEVICE = hardware.find("h100")
EP = 8
DIM = 1024
TOP_K = 2
SEQ_LEN = 4096
MODEL = shapes.decoder(
    "experts", 4, DIM, 16, 16, 0, 1000, SEQ_LEN, experts=shapes.ExpertShape(16, TOP_K, 2048)
)
JOB = job_sizes.PlannedJob(
    seq_len=SEQ_LEN, rows=1, dp_shard=EP, ep=EP, stages=(range(4),), reshard="never"
)


def step_seconds(job: job_sizes.PlannedJob) -> timing.StepTime:
    return timing.of_step(MODEL, job, DEVICE, None)


def test_balanced_routers_exchange_no_more_than_the_rows_of_each_token() -> None:
    job = replace(JOB, balanced=True)
    forward = layer_timing.layer_pass(MODEL.layers[0], job, DEVICE, DIM).forward

    # Each rank keeps 1/EP of its rows and sends the rest to other ranks, before and after the experts.
    row_bytes = DIM * 2
    sent_bytes = SEQ_LEN * TOP_K * row_bytes * (EP - 1) / EP
    link_rate = DEVICE.link.bytes_per_second * DEVICE.link.efficiency
    without_latency = 2 * sent_bytes / link_rate
    latency = 2 * DEVICE.link.latency_seconds * (1 + 3 / 2)  # log2(8 ranks) = 3

    assert forward["expert exchange"] == pytest.approx(without_latency + latency)


def test_the_busiest_rank_of_free_routers_has_more_rows() -> None:
    balanced = step_seconds(replace(JOB, balanced=True)).costs
    free = step_seconds(JOB).costs
    for name in ("matmul", "elementwise", "expert exchange"):
        assert free[name] > balanced[name]
    assert free["attention"] == balanced["attention"]


def test_an_exchange_behind_computation_costs_less_but_not_nothing() -> None:
    exposed = step_seconds(JOB)
    hidden = step_seconds(replace(JOB, hides_exchange=True))
    assert 0 < hidden.costs["expert exchange"] < exposed.costs["expert exchange"]
    for name in ("matmul", "attention", "elementwise"):
        assert hidden.costs[name] == exposed.costs[name]


def test_the_product_of_a_rank_with_one_expert_is_a_plain_product() -> None:
    job = replace(JOB, ep=16, dp_shard=16, balanced=True)
    expert = shapes.Linear("", DIM, 2048, "replicate")
    plain = 3 * layer_timing.product_seconds(expert, job, DEVICE, SEQ_LEN * TOP_K, 1)
    layer = MODEL.layers[0]
    others = 0.0
    for linear in layer.linears:
        if linear.style != "router":
            others += layer_timing.product_seconds(linear, job, DEVICE, SEQ_LEN, 1)
    forward = layer_timing.layer_pass(layer, job, DEVICE, DIM).forward

    assert forward["matmul"] == pytest.approx(others + plain)


def test_debug_moe_force_load_balance_plans_balanced_routers() -> None:
    plain = config.load("debug", []).config
    forced = config.load("debug", ["--debug.moe_force_load_balance=true"]).config
    assert not job_sizes.of_config(plain, 1, 2).balanced
    assert job_sizes.of_config(forced, 1, 2).balanced
