"""Preference rows in common layouts are split into one prompt and two answers."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from shardtrain.data.documents.columns import Unusable
from shardtrain.data.documents.preferences import split

ASK = {"role": "user", "content": "Sea?"}
GOOD = {"role": "assistant", "content": "Blue."}
BAD = {"role": "assistant", "content": "Red."}
SYSTEM = {"role": "system", "content": "Be brief."}
HUMAN = "\n\nHuman: Sea?\n\nAssistant:"


def split_row(row: dict[str, Any]) -> Any:
    before = copy.deepcopy(row)
    pair = split(row, "prompt", "chosen", "rejected")
    assert row == before, "the row must not be modified"
    return pair


def test_every_layout_of_a_conversation_is_split_alike() -> None:
    full_answers = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    shapes: list[dict[str, Any]] = [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASK], **full_answers},
        {"prompt": "Sea?", **full_answers},  # ultrafeedback_binarized
        {"prompt": "Sea?", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASK], "chosen": "Blue.", "rejected": "Red."},
        full_answers,
    ]

    for row in shapes:
        assert split_row(row) == ([ASK], [GOOD], [BAD]), row

    more = {"prompt": "Sea?", "chosen": [SYSTEM, ASK, GOOD], "rejected": [SYSTEM, ASK, BAD]}
    assert split_row(more) == ([SYSTEM, ASK], [GOOD], [BAD])


def test_equal_answers_have_a_prompt() -> None:
    assert split_row({"prompt": "Sea?", "chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}) == (
        [ASK],
        [GOOD],
        [GOOD],
    )


def test_texts_have_a_prompt_column_or_a_common_beginning() -> None:
    assert split_row({"prompt": "a", "chosen": "b", "rejected": "c"}) == ("a", "b", "c")

    # hh-rlhf: the answer begins after the speaker's name, even if both answers begin with the same words
    sides = {"chosen": HUMAN + " The blue.", "rejected": HUMAN + " The red."}
    assert split_row(sides) == (HUMAN, " The blue.", " The red.")
    # no name: the answers begin at the first different word, including the space before it
    assert split_row({"chosen": "2+2 is four", "rejected": "2+2 is forty"}) == (
        "2+2 is",
        " four",
        " forty",
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"chosen": "a"}, "has no column 'rejected'"),
        ({"chosen": "Blue.", "rejected": "Red."}, "begin with different words"),
        ({"chosen": "Blue.", "rejected": "Blue."}, "are the same text"),
        (
            {"chosen": [ASK, GOOD], "rejected": "Red."},
            "chosen is a list and rejected is a text; both must be texts",
        ),
        ({"chosen": [GOOD], "rejected": [BAD]}, "begin with different messages"),
        (
            {"prompt": "Sky?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
            "is not among the messages that both answers",
        ),
        (
            {"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [BAD]},
            "only one of the two answers repeats",
        ),
        (
            {"prompt": None, "chosen": "a", "rejected": "b"},
            "column 'prompt' holds null, not a text",
        ),
        (
            {"prompt": 3, "chosen": [GOOD], "rejected": [BAD]},
            "holds a number, neither a text nor a list of messages",
        ),
        (
            {"prompt": [ASK], "chosen": [ASK], "rejected": [GOOD]},
            "the chosen answer begins with a turn of 'user'",
        ),
        ({"prompt": "a", "chosen": "\ud800", "rejected": "b"}, "lone surrogate"),
    ],
)
def test_invalid_pair_is_reported(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unusable) as caught:
        split(row, "prompt", "chosen", "rejected")
    assert reason in caught.value.reason


def test_configured_prompt_column_must_exist() -> None:
    with pytest.raises(Unusable, match="has no column 'question'"):
        split({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "question", "chosen", "rejected")
