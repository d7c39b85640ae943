"""Learning-rate schedules: the published closed forms, and bounds for any settings."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain import config
from shardtrain.config.rules.own_files_rules import SCHEDULE_OPTIONS
from shardtrain.config.schema import LRScheduler, Optimizer
from shardtrain.facts.lr_schedules import SCHEDULES, options_of
from shardtrain.optim.lr_scheduler import learning_rate

EXACT = 1e-12
"""Relative rounding of a few float64 operations."""


def rates(steps, lr=1.0, count=None, **scheduler):
    """Return the learning rates of the first ``count`` steps (by default all) of a run."""
    optimizer = Optimizer(lr=lr)
    schedule = LRScheduler(**scheduler)
    if count is None:
        count = steps
    return [learning_rate(optimizer, schedule, steps, step) for step in range(count)]


def test_warmup_stable_decay_reaches_the_peak_and_ends_one_step_before_zero():
    rise = [1 / 2, 1]
    fall = [k / 8 for k in range(8, 0, -1)]
    assert rates(10, warmup_steps=2) == pytest.approx(rise + fall, rel=EXACT)


def test_warmup_stable_decay_stays_at_the_peak_until_its_share_of_decay():
    # W=2, decay round(10 * 0.4) = 4, so 10 + 1 - 2 - 4 = 5 stable steps
    assert rates(10, warmup_steps=2, decay_ratio=0.4) == pytest.approx(
        [0.5, 1, 1, 1, 1, 1, 1, 3 / 4, 2 / 4, 1 / 4]
    )


@pytest.mark.parametrize(
    ("decay_type", "shape"),
    [
        ("linear", lambda p: 1 - p),
        ("sqrt", lambda p: 1 - math.sqrt(p)),
        ("cosine", lambda p: 0.5 * (1 + math.cos(math.pi * p))),
    ],
)
def test_decay_has_its_shape_above_the_minimum_rate(decay_type, shape):
    got = rates(10, warmup_steps=2, decay_type=decay_type, min_lr_factor=0.1)
    expected = [0.1 + 0.9 * shape(k / 8) for k in range(1, 8)]
    assert got[3:] == pytest.approx(expected, rel=EXACT)


def test_warmup_longer_than_the_run_is_shortened():
    assert rates(4, warmup_steps=200) == pytest.approx([0.25, 0.5, 0.75, 1])


def test_decay_that_does_not_fit_after_the_warmup_is_shortened():
    assert rates(10, warmup_steps=6, decay_ratio=0.9) == rates(10, warmup_steps=6)


def test_no_decay_keeps_the_peak():
    assert rates(5, warmup_steps=0, decay_ratio=0.0) == [1] * 5


def test_linear_linear_matches_torchtrain():
    rise = [1 / 3, 2 / 3, 1]
    fall = [k / 8 for k in range(7, 0, -1)]
    actual = rates(10, name="linear_linear", warmup_steps=2)
    assert actual == pytest.approx(rise + fall, rel=EXACT)


def test_linear_by_proportion_rounds_the_warmup_down():
    got = rates(396, name="linear_by_proportion", warmup_proportion=0.01)  # int(3.96) = 3 steps
    assert got[:5] == pytest.approx([0, 1 / 3, 2 / 3, 1, 392 / 393])
    assert got[-1] == pytest.approx(1 / 393)
    assert rates(4, name="linear_by_proportion", warmup_proportion=0.0) == pytest.approx(
        [1, 3 / 4, 2 / 4, 1 / 4]
    )


def test_logarithmic_deepspeed_warmup_matches_published_values():
    got = rates(100, lr=5e-5, name="deepspeed_warmup", warmup_steps=50, min_lr_factor=0.02)
    expected = {0: 1e-6, 10: 3.1035e-5, 25: 4.1809e-5, 49: 5e-5, 50: 5e-5, 99: 5e-5}
    # published with five digits
    assert {step: got[step] for step in expected} == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(
    ("warmup", "least", "most"), [(50, 1e-6, 5e-5), (50, 1e-6, 1e-5), (2000, 0.0, 1.5e-4)]
)
def test_deepspeed_warmup_matches_its_closed_form_at_every_step(warmup, least, most):
    got = rates(
        warmup + 20,
        lr=most,
        name="deepspeed_warmup",
        warmup_steps=warmup,
        min_lr_factor=least / most,
    )
    logs = [
        least + (most - least) * math.log(step + 1) / math.log(warmup) for step in range(warmup)
    ]

    # both computations have a few rounding errors
    assert got == pytest.approx([*logs, *[most] * 20], rel=EXACT, abs=1e-18)


@pytest.mark.parametrize("decay_type", ["linear", "cosine"])
def test_transformers_schedule_begins_at_zero(decay_type):
    got = rates(10, name="transformers", warmup_steps=2, decay_type=decay_type)
    progress = [step / 8 for step in range(8)]
    if decay_type == "linear":
        decay = [1 - p for p in progress]
    else:
        decay = [0.5 * (1 + math.cos(math.pi * p)) for p in progress]
    assert got == pytest.approx([0, 1 / 2, *decay], rel=EXACT)


def test_warmup_proportion_is_rounded_up_as_in_transformers():
    # ceil(3.96) = 4 steps
    got = rates(396, name="transformers", warmup_steps=0, warmup_proportion=0.01)
    assert got[:6] == pytest.approx([0, 1 / 4, 2 / 4, 3 / 4, 1, 391 / 392])
    assert rates(
        3, name="transformers", warmup_steps=0, warmup_proportion=0.0, min_lr_factor=1.0
    ) == [1, 1, 1]


def test_deepspeed_warmup_can_be_linear_and_takes_at_least_two_steps():
    got = rates(6, name="deepspeed_warmup", warmup_type="linear", warmup_steps=4)
    assert got == pytest.approx([0, 0.25, 0.5, 0.75, 1, 1])
    for warmup_type in ("log", "linear"):
        assert rates(3, name="deepspeed_warmup", warmup_type=warmup_type, warmup_steps=0)[0] == 0
        assert rates(3, name="deepspeed_warmup", warmup_type=warmup_type, warmup_steps=0)[2] == 1


@pytest.mark.parametrize("warmup_type", ["log", "linear"])
@pytest.mark.parametrize(("warmup", "total"), [(10, 40), (0, 9), (9, 10), (20, 12)])
def test_deepspeed_schedules_with_an_end_match_their_closed_forms(warmup_type, warmup, total):
    """Compare with ``_get_gamma`` of WarmupDecayLR and ``get_lr_ratio`` of WarmupCosineLR at iterations 0, 1, ..."""
    n = max(2, warmup)
    lowest = 1e-6
    peak = 5e-5
    common = {"lr": peak, "warmup_steps": warmup, "warmup_type": warmup_type}
    rise = [i / n for i in range(n)]
    if warmup_type == "log":
        rise = [math.log(i + 1) / math.log(n) for i in range(n)]

    fall = [max(0.0, (total - i) / max(1.0, total - n)) for i in range(n, total)]
    expected = [lowest + (peak - lowest) * share for share in (*rise, *fall)]
    got = rates(total, name="deepspeed_warmup_decay", min_lr_factor=lowest / peak, **common)
    assert got == pytest.approx(expected[:total], rel=EXACT)

    cosine = []
    for i in range(n, total):
        progress = (i - n + 1) / (total - n)
        cosine.append(0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2)
    expected = [peak * share for share in (*rise, *cosine)]
    got = rates(total, name="deepspeed_warmup_cosine", min_lr_factor=0.1, **common)
    assert got == pytest.approx(expected[:total], rel=EXACT)


@pytest.mark.parametrize("name", SCHEDULES)
@settings(max_examples=60, derandomize=True)
@given(data=st.data())
def test_rates_stay_between_zero_and_the_peak(name, data):
    ratio = st.floats(0, 1)
    scheduler = LRScheduler(
        name=name,
        warmup_steps=data.draw(st.integers(0, 60)),
        total_steps=data.draw(st.none() | st.integers(1, 60)),
        decay_ratio=data.draw(st.none() | ratio),
        decay_type=data.draw(st.sampled_from(["linear", "sqrt", "cosine"])),
        min_lr_factor=data.draw(ratio),
        warmup_proportion=data.draw(ratio),
        warmup_type=data.draw(st.sampled_from(["log", "linear"])),
    )
    steps = data.draw(st.integers(1, 50))
    lr = data.draw(st.floats(0, 10))
    got = [learning_rate(Optimizer(lr=lr), scheduler, steps, step) for step in range(70)]

    assert all(0 <= rate <= lr for rate in got)

    peak = got.index(max(got))
    # one rise and one fall; equal neighbors may differ in the last bit
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(got[: peak + 1]))
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(got[peak:]))

    total = scheduler.total_steps or steps
    assert set(got[total - 1 :]) <= {got[total - 1]}


@pytest.mark.parametrize("name", SCHEDULES)
def test_total_steps_override_the_steps_of_the_run(name):
    assert rates(50, name=name, total_steps=10, warmup_steps=2, count=10) == rates(
        10, name=name, warmup_steps=2
    )
    assert (
        rates(3, name=name, total_steps=10, warmup_steps=2)
        == rates(10, name=name, warmup_steps=2)[:3]
    )


OTHER_VALUES = {
    "warmup_steps": 7,
    "decay_ratio": 0.3,
    "decay_type": "cosine",
    "min_lr_factor": 0.25,
    "warmup_proportion": 0.4,
    "warmup_type": "linear",
}
"""For each option, a value different from the one in ``PLAIN``."""
PLAIN = {"warmup_steps": 4, "warmup_proportion": 0.2}


def half(step: int, total_steps: int, min_lr_factor: float) -> float:
    """Custom schedule: peak rate for half of the steps, then ``min_lr_factor`` times the peak."""
    return 1.0 if 2 * step < total_steps else min_lr_factor


@pytest.fixture(params=[*SCHEDULES, "half"])
def schedule(request, monkeypatch):
    """Each schedule of the package, and a custom one added as docs/architecture.md describes."""
    monkeypatch.setitem(SCHEDULES, "half", half)
    return request.param


def test_schedule_rejects_options_that_it_does_not_read(schedule):
    def problems(*arguments):
        name = f"--lr_scheduler.name={schedule}"
        return [
            problem.option for problem in config.check(config.load("debug", [name, *arguments]))
        ]

    assert problems() == []
    assert set(OTHER_VALUES) == set(SCHEDULE_OPTIONS)

    for option, value in OTHER_VALUES.items():
        expected = [] if option in options_of(SCHEDULES[schedule]) else [f"lr_scheduler.{option}"]
        assert problems(f"--lr_scheduler.{option}={value}") == expected


def test_each_option_that_a_schedule_reads_changes_a_rate(schedule):
    # the transformers schedule reads warmup_proportion only without warmup_steps
    plain = {**PLAIN, "warmup_steps": 0} if schedule == "transformers" else PLAIN
    before = rates(20, name=schedule, **plain)
    for option in options_of(SCHEDULES[schedule]):
        assert rates(20, name=schedule, **{**plain, option: OTHER_VALUES[option]}) != before, option


def test_unknown_schedule_is_an_error_with_the_nearest_name():
    problems = config.check(config.load("debug", ["--lr_scheduler.name=linear_lineer"]))
    (problem,) = [problem for problem in problems if problem.option == "lr_scheduler.name"]
    assert 'did you mean "linear_linear"?' in str(problem)
