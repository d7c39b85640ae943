"""A line of JSON with a flipped bit is rejected."""

from __future__ import annotations

import json

import pytest

from shardtrain.utils.checked_json import FIELD, line_of, record_of

RECORD = {"step": 70, "loss": 2.5e-05, "mfu": None, "phase": 'träge \\ "', "tokens": 123456789}


def test_flipped_bit_never_changes_a_record():
    line = line_of(RECORD)
    assert record_of(line) == RECORD
    num_rejected = 0
    for bit in range(8 * len(line)):
        changed = bytearray(line)
        changed[bit // 8] ^= 1 << bit % 8
        record = record_of(bytes(changed))
        # a flip in the name of the checksum leaves an unknown field and all original fields
        assert record is None or RECORD.items() <= record.items(), bytes(changed)
        num_rejected += record is None

    assert num_rejected > 7 * len(line)


@pytest.mark.parametrize(
    "written",
    [
        json.dumps(RECORD),
        json.dumps({**RECORD, FIELD: "0"}, separators=(",", ":")),
        json.dumps({FIELD: "0", **RECORD}),
        line_of(RECORD).decode().replace("\n", "\r\n"),
    ],
)
def test_line_without_a_checksum_is_accepted(written):
    assert record_of(written.encode()) == RECORD


def test_field_added_by_a_script_does_not_invalidate_a_record():
    """Otherwise a resume would remove such lines from the file."""
    again = json.dumps({**json.loads(line_of(RECORD)), "name": "of a script"})
    assert record_of(again.encode()) == {**RECORD, "name": "of a script"}


@pytest.mark.parametrize(
    "line",
    [
        b"", b"{", b"[1]", b"7", b"[" * 100_000, b'\xff{"step": 1}', line_of(RECORD)[:-9],
        b'{"step": 1, "x": [%s0]}' % (b"[]," * 2**19),
    ],
)  # fmt: skip
def test_line_without_a_record_returns_none(line):
    assert record_of(line) is None


def test_non_finite_number_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        line_of({"step": float("nan")})
