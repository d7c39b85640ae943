"""Rows of preferences in the shapes that people have: one prompt and two answers, whatever the columns hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from shardtrain.data.documents.columns import Unusable
from shardtrain.data.documents.preferences import split

ASK = {"role": "user", "content": "Sea?"}
GOOD, BAD = {"role": "assistant", "content": "Blue."}, {"role": "assistant", "content": "Red."}
SYSTEM = {"role": "system", "content": "Be brief."}
HUMAN = "\n\nHuman: Sea?\n\nAssistant:"


def parted(row: dict[str, Any]) -> Any:
    before = copy.deepcopy(row)
    found = split(row, "prompt", "chosen", "rejected")
    assert row == before, "a row is left as it was"
    return found


def test_every_shape_of_one_conversation_is_that_conversation() -> None:
    whole = {"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}
    shapes: list[dict[str, Any]] = [
        {"prompt": [ASK], "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASK], **whole},
        {"prompt": "Sea?", **whole},  # ultrafeedback_binarized
        {"prompt": "Sea?", "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": [ASK], "chosen": "Blue.", "rejected": "Red."},
        whole,
    ]
    for row in shapes:
        assert parted(row) == ([ASK], [GOOD], [BAD]), row
    more = {"prompt": "Sea?", "chosen": [SYSTEM, ASK, GOOD], "rejected": [SYSTEM, ASK, BAD]}
    assert parted(more) == ([SYSTEM, ASK], [GOOD], [BAD])


def test_answers_that_are_equal_still_have_a_prompt() -> None:
    assert parted({"prompt": "Sea?", "chosen": [ASK, GOOD], "rejected": [ASK, GOOD]}) == ([ASK], [GOOD], [GOOD])


def test_texts_have_a_prompt_of_their_own_or_what_they_begin_with() -> None:
    assert parted({"prompt": "a", "chosen": "b", "rejected": "c"}) == ("a", "b", "c")
    # hh-rlhf: the answer begins after the speaker's name, also where both begin with the same words
    sides = {"chosen": HUMAN + " The blue.", "rejected": HUMAN + " The red."}
    assert parted(sides) == (HUMAN, " The blue.", " The red.")
    # no name: at the word in which they part, which keeps the space before it
    assert parted({"chosen": "2+2 is four", "rejected": "2+2 is forty"}) == ("2+2 is", " four", " forty")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"chosen": "a"}, "has no column 'rejected'"),
        ({"chosen": "Blue.", "rejected": "Red."}, "begin with different words"),
        ({"chosen": "Blue.", "rejected": "Blue."}, "are the same text"),
        ({"chosen": [ASK, GOOD], "rejected": "Red."}, "chosen is a list and rejected a text; both must be alike"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "begin with different messages"),
        (
            {"prompt": "Sky?", "chosen": [ASK, GOOD], "rejected": [ASK, BAD]},
            "is not one of the messages that both answers",
        ),
        ({"prompt": [ASK], "chosen": [ASK, GOOD], "rejected": [BAD]}, "one answer repeats the messages"),
        ({"prompt": None, "chosen": "a", "rejected": "b"}, "column 'prompt' holds null, not a text"),
        ({"prompt": 3, "chosen": [GOOD], "rejected": [BAD]}, "holds a number, neither a text nor a list of messages"),
        ({"prompt": [ASK], "chosen": [ASK], "rejected": [GOOD]}, "the chosen answer begins with a turn of 'user'"),
        ({"prompt": "a", "chosen": "\ud800", "rejected": "b"}, "lone surrogate"),
    ],
)
def test_what_is_not_a_pair_is_reported(row: dict[str, Any], told: str) -> None:
    with pytest.raises(Unusable) as caught:
        split(row, "prompt", "chosen", "rejected")
    assert told in caught.value.reason


def test_a_prompt_column_that_was_named_must_be_there() -> None:
    with pytest.raises(Unusable, match="has no column 'question'"):
        split({"chosen": [ASK, GOOD], "rejected": [ASK, BAD]}, "question", "chosen", "rejected")
