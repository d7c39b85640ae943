"""Every kind of bad row has a defined result at its line number, in plain and compressed files and bounded memory."""

from __future__ import annotations

import gzip
import subprocess
import sys

import pytest

from shardtrain.data.sources import BadRow, Request, every_row, jsonl, place_of

GOOD = b'{"text": "good"}'
MILLION = "a " * 10**6

# name: (bytes of one line, the parsed row or the reason why it is bad)
LINES = {
    "no JSON": (
        b"{text: 1}",
        "is not JSON: expecting property name enclosed in double quotes (column 2)",
    ),
    "cut": (b'{"text": "a', "is not JSON: unterminated string starting (column 10)"),
    "two objects": (b'{"text": "a"} {"text": "b"}', "is not JSON: extra data (column 15)"),
    "trailing comma": (b'{"text": "a",}', "is not JSON"),
    "single quotes": (b"{'text': 'a'}", "is not JSON"),
    # The row format checks types and fields, not the source.
    "wrong type": (b'{"text": 7}', {"text": 7}),
    "missing field": (b'{"title": "a"}', {"title": "a"}),
    "null": (b'{"text": null}', {"text": None}),
    "nested": (b'{"text": {"body": ["a"]}}', {"text": {"body": ["a"]}}),
    "empty text": (b'{"text": ""}', {"text": ""}),
    "escaped NUL": (b'{"text": "a\\u0000b"}', {"text": "a\0b"}),
    "raw NUL": (b'{"text": "a\0b"}', "is not JSON: invalid control character (column 12)"),
    "line of NUL": (bytes(100), "is not JSON: expecting value (column 1)"),
    "raw control character": (
        b'{"text": "a\x0bb"}',
        "is not JSON: invalid control character (column 12)",
    ),
    "lone high surrogate": (
        b'{"text": "a\\ud83d"}',
        "contains half of a surrogate pair, which is not text (\\ud83d)",
    ),
    "lone low surrogate": (
        b'{"text": "\\uDE00b"}',
        "contains half of a surrogate pair, which is not text (\\ude00)",
    ),
    "lone surrogate in a key": (
        b'{"a\\ud83d": {"b": 1}}',
        "contains half of a surrogate pair, which is not text (\\ud83d)",
    ),
    "surrogate pair": (b'{"text": "\\ud83d\\ude00"}', {"text": "\U0001f600"}),
    "an escaped surrogate escape": (b'{"text": "\\\\ud83d"}', {"text": "\\ud83d"}),
    "bad UTF-8": (b'{"text": "a\xff"}', "is not UTF-8 (byte 12 is 0xff)"),
    "cut UTF-8": (b'{"text": "a\xc3', "is not UTF-8 (byte 12 is 0xc3)"),
    "UTF-8 of a surrogate": (b'{"text": "\xed\xa0\xbd"}', "is not UTF-8 (byte 11 is 0xed)"),
    "mark within the file": (
        b'\xef\xbb\xbf{"text": "a"}',
        "is not JSON: expecting value (column 1)",
    ),
    "line separators within": ('{"text": "a\u2028b\u0085c"}'.encode(), {"text": "a\u2028b\u0085c"}),
    "CRLF": (b'{"text": "a"}\r', {"text": "a"}),
    "white space around": (b' \t{"text": "a"}  ', {"text": "a"}),
    "a million tokens": (b'{"text": "%s"}' % MILLION.encode(), {"text": MILLION}),
    "nested 10,000 deep": (b'{"a":' * 10**4 + b"1" + b"}" * 10**4, "is nested too deeply"),
    "nested 201 deep": (
        b'{"a":' * 201 + b"1" + b"}" * 201,
        "is nested too deeply (more than 200 levels)",
    ),
    "nested 3 deep with many brackets": (b'{"a": [' + b"[], " * 300 + b"[]]}", {"a": [[]] * 301}),
    "arrays 100,000 deep": (b'{"a":' + b"[" * 10**5, "is nested too deeply"),
    "key twice": (b'{"text": "a", "text": "b"}', 'has a duplicate key ("text")'),
    "key twice within": (b'{"text": {"b": 1, "c": 2, "b": 1}}', 'has a duplicate key ("b")'),
    "NaN": (b'{"text": "a", "score": NaN}', "contains NaN, which is not JSON"),
    "Infinity": (b'{"text": "a", "score": [Infinity]}', "contains Infinity, which is not JSON"),
    "-Infinity": (b'{"text": "a", "score": -Infinity}', "contains -Infinity, which is not JSON"),
    "NaN as text": (b'{"text": "NaN"}', {"text": "NaN"}),
    "integer above 2**63": (
        b'{"text": "a", "id": 18446744073709551617}',
        {"text": "a", "id": 2**64 + 1},
    ),
    "integer of 10,000 digits": (
        b'{"id": ' + b"1" * 10**4 + b"}",
        "contains a number with too many digits",
    ),
    "array": (b'["a"]', "is not a JSON object but an array"),
    "string": (b'"a"', "is not a JSON object but a string"),
    "number": (b"1.5", "is not a JSON object but a number"),
    "boolean": (b"true", "is not a JSON object but a boolean"),
    "only null": (b"null", "is not a JSON object but null"),
    "empty object": (b"{}", {}),
}


@pytest.fixture(params=["plain", "compressed"])
def write(request, tmp_path):
    def to_file(content):
        if request.param == "plain":
            path = tmp_path / "a.jsonl"
            path.write_bytes(content)
        else:
            path = tmp_path / "a.jsonl.gz"
            path.write_bytes(gzip.compress(content, 1))
        return path

    return to_file


def read(path, **options):
    source = jsonl.open_source(Request(str(path), **options))
    return [(place_of(source, key), row) for key, row in every_row(source)]


@pytest.mark.parametrize("kind", LINES)
def test_bad_line_has_a_defined_result_and_does_not_affect_others(write, kind):
    line, expected = LINES[kind]
    path = write(b"\n".join([GOOD, b"", line, GOOD]) + b"\n")
    (_, first), (place, row), (last_place, last) = read(path)

    assert first == {"text": "good"}
    assert last == {"text": "good"}
    assert (place, last_place) == (f"{path}:3", f"{path}:4")

    if isinstance(expected, dict):
        assert row == expected
    else:
        assert isinstance(row, BadRow)
        assert not row.harmless
        assert str(row).startswith(expected)
        assert "\n" not in str(row)
        assert len(str(row)) < 200


def test_200_levels_of_nesting_are_read_at_any_stack_depth(write):
    line = b'{"a":' * 200 + b"1" + b"}" * 200
    path = write(line)

    def deeper(levels):
        return read(path) if levels == 0 else deeper(levels - 1)

    ((_, row),) = deeper(500)
    assert row == read(path)[0][1]
    assert not isinstance(row, BadRow)


def test_reasons_do_not_depend_on_the_row(tmp_path):
    """Bad rows are counted by reason, so a reason must not contain details of its row."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(
        b"".join(
            b'{"k%d": "%s\n' % (n, b"x" * n) + b'{"%d": 1, "%d": 2}\n' % (n, n) for n in range(200)
        )
    )

    assert {row.reason for _, row in read(path)} == {
        "is not JSON: unterminated string starting",
        "has a duplicate key",
    }


def test_byte_order_mark_is_not_part_of_the_first_row(write):
    path = write(b"\xef\xbb\xbf" + GOOD + b"\n")
    assert read(path) == [(f"{path}:1", {"text": "good"})]


def test_file_with_only_a_byte_order_mark_has_no_rows(write):
    assert read(write(b"\xef\xbb\xbf")) == []
    assert read(write(b"\xef\xbb\xbf\r\n \n")) == []


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n\n", b"\n \t\r\n", b"\n  "])
def test_last_line_is_read_once_with_or_without_a_line_end(write, end):
    path = write(GOOD + b"\r\n" + GOOD + end)
    assert read(path) == [(f"{path}:1", {"text": "good"}), (f"{path}:2", {"text": "good"})]


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_row_may_have_at_most_max_row_bytes(write, end):
    # The first row has exactly the maximum length. The others exceed it by a space, before a
    # newline or at the end of the file.
    path = write(GOOD + b"\n" + GOOD + b" \n" + GOOD + b" " + end)
    reason = BadRow("is longer than data.max_row_bytes", detail=f"{len(GOOD) + 1} bytes")
    assert read(path, max_row_bytes=len(GOOD)) == [
        (f"{path}:1", {"text": "good"}),
        (f"{path}:2", reason),
        (f"{path}:3", reason),
    ]


MEASURE = """
import resource, sys
from shardtrain.data.sources import Request, every_row, jsonl
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
source = jsonl.open_source(Request(sys.argv[1]))
rows = [str(row) for _, row in every_row(source)]
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, rows)
"""


def test_row_of_64_mb_is_skipped_without_loading_it(write):
    path = write(GOOD + b'\n{"text": "' + b"a" * 64 * 2**20 + b'"}\n' + GOOD)
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True
    )
    grown, rows = result.stdout.split(maxsplit=1)
    good = "{'text': 'good'}"

    assert rows.strip() == str(
        [good, f"is longer than data.max_row_bytes ({64 * 2**20 + 12} bytes)", good]
    )
    # Two blocks of 16 MiB plus a mask and an index of one block. Reading and parsing the row would
    # take 128 MiB.
    assert int(grown) / 1024 < 72
