"""Counters of a run: updates, skips, and their JSON form."""

from __future__ import annotations

import json

import pytest

from shardtrain.checkpoint.train_state import TrainState
from shardtrain.utils.errors import CheckpointError


def test_step_counts_samples_tokens_and_applied_updates() -> None:
    state = TrainState()
    for step, applied in enumerate((True, False, False, True, False)):
        state.advance(
            samples_consumed=8 * (step + 1), tokens=500, row_hashes=2**62, applied=applied
        )

    assert state == TrainState(
        step=5,
        updates=2,
        samples_consumed=40,
        tokens_seen=2500,
        nonfinite_skips=1,
        order_hash=2**62,
    )


def test_only_consecutive_skips_are_counted() -> None:
    state = TrainState()
    skips = []
    for applied in (False, False, True, False):
        state.advance(1, 1, 0, applied)
        skips.append(state.nonfinite_skips)

    assert skips == [1, 2, 0, 1]


def test_counters_round_trip_through_json() -> None:
    state = TrainState(10**12, 7, 2**62, 10**18, 3, 2**64 - 1)
    loaded = TrainState()
    loaded.load(json.loads(json.dumps(state.to_dict())))
    assert loaded == state


@pytest.mark.parametrize("bad", [None, "5", 5.0, True, -1, [5]])
def test_invalid_counter_is_rejected_with_its_name(bad: object) -> None:
    values = {**TrainState().to_dict(), "updates": bad}
    with pytest.raises(
        CheckpointError, match=r"^train state: updates=.* is not a count; use another checkpoint$"
    ):
        TrainState().load(values)


def test_missing_counter_is_rejected_and_unknown_ones_are_ignored() -> None:
    values = TrainState(3, 3, 3, 3, 0).to_dict()
    state = TrainState()
    state.load({**values, "of a later version": 1})

    assert state.step == 3

    del values["tokens_seen"]
    with pytest.raises(CheckpointError, match="tokens_seen=None"):
        state.load(values)
