"""Split rows of preference data into a prompt and two answers.

Rows contain texts or lists of messages. The prompt is in a separate column, or it is the common beginning
of the columns chosen and rejected.
These columns contain only answers, or complete conversations that repeat the prompt:

- ``{"prompt": "...", "chosen": "...", "rejected": "..."}``
- ``{"prompt": [user], "chosen": [assistant], "rejected": [assistant]}``
- ``{"prompt": "...", "chosen": [user, assistant], "rejected": [user, assistant]}``
  (ultrafeedback_binarized)
- ``{"chosen": [user, assistant], "rejected": [user, assistant]}``
- ``{"chosen": "\\n\\nHuman: ... \\n\\nAssistant: ...", "rejected": ...}`` (hh-rlhf)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtrain.data.chat.messages import Message, joined, messages_of
from shardtrain.data.documents.columns import Unusable, check_text, column, kind

Part = str | list[Message]
_SPEAKER = "\n\nAssistant:"
"""The text before each answer in hh-rlhf."""


def split(
    row: Mapping[str, Any], prompt_field: str, chosen_field: str, rejected_field: str
) -> tuple[Part, Part, Part]:
    """Return the prompt, the chosen and the rejected answer of a row,
    as three texts or three lists of messages.

    Without a prompt column, the prompt is the common beginning of chosen and rejected.

    Raises:
        Unusable: the columns do not fit together, or the two sides have no common beginning.
    """
    chosen = column(row, chosen_field)
    rejected = column(row, rejected_field)
    # "prompt" is the default of the option, so rows may lack this column. Any other column must exist.
    has_prompt = prompt_field in row or prompt_field != "prompt"
    prompt = column(row, prompt_field) if has_prompt else None
    sides = (chosen, rejected)

    # Both answers are texts. The prompt is a conversation, a text, or, without a column, their
    # common beginning.
    if all(isinstance(side, str) for side in sides):
        check_text(chosen, f"column {chosen_field!r}")
        check_text(rejected, f"column {rejected_field!r}")
        if isinstance(prompt, list | tuple):
            before = messages_of(prompt, prompt_field)
            return before, *([{"role": "assistant", "content": side}] for side in sides)  # type: ignore[return-value]
        if has_prompt and not isinstance(prompt, str):
            raise Unusable(f"column {prompt_field!r} holds {kind(prompt)}, not a text")
        if prompt is not None:
            return check_text(prompt, f"column {prompt_field!r}"), chosen, rejected
        cut = _end_of_prompt(chosen, rejected)
        return chosen[:cut], chosen[cut:], rejected[cut:]
    if any(isinstance(side, str) for side in sides):
        raise Unusable(
            f"chosen is {kind(chosen)} and rejected is {kind(rejected)}; both must be texts, or both lists of "
            "messages"
        )

    # Both answers are lists of messages.
    return _messages(
        prompt,
        has_prompt,
        messages_of(chosen, chosen_field),
        messages_of(rejected, rejected_field),
        prompt_field,
    )


def _messages(
    prompt: Any, has_prompt: bool, chosen: list[Message], rejected: list[Message], prompt_field: str
) -> tuple[list[Message], list[Message], list[Message]]:
    """Split lists of messages into a prompt and two answers. An answer has at least one message."""
    # Count the common messages at the beginning of both sides.
    # The last message of a side is always an answer.
    common = 0
    while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
        common += 1
    before = chosen[:common]
    if isinstance(prompt, list | tuple):
        # The prompt is a list of messages. If both answers begin with it, remove it from them.
        before = messages_of(prompt, prompt_field)
        repeats = []
        for side in (chosen, rejected):
            repeats.append(side[: len(before)] == before and len(side) > len(before))
        common = len(before) if all(repeats) else 0
        if any(repeats) and not all(repeats):
            raise Unusable(
                f"only one of the two answers repeats the messages of column {prompt_field!r}"
            )
    elif isinstance(prompt, str):
        # The prompt is a text. If the columns contain only answers, the prompt is the user's turn. If they
        # contain entire conversations, the prompt must be one of the messages that both begin with.
        texts = (joined(message).get("content", "").strip() for message in before)
        if not before and chosen[0]["role"] == rejected[0]["role"] == "assistant":
            text = check_text(prompt, f"column {prompt_field!r}")
            before = [{"role": "user", "content": text}]
        elif prompt.strip() not in texts:
            raise Unusable(
                f"the text of column {prompt_field!r} is not among the messages that both answers begin with"
            )
    elif has_prompt:
        raise Unusable(
            f"column {prompt_field!r} holds {kind(prompt)}, neither a text nor a list of messages"
        )
    elif not common:
        rule = "chosen and rejected begin with different messages, which leaves no prompt"
        raise Unusable(f"{rule}; add a column {prompt_field!r}")
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        role = side[common]["role"]
        if role != "assistant":
            raise Unusable(
                f"the {name} answer begins with a turn of {role!r}, not of the assistant"
            )
    return before, chosen[common:], rejected[common:]


def _end_of_prompt(chosen: str, rejected: str) -> int:
    """Return the length of the prompt with which two texts begin.

    The prompt ends after the last common "Assistant:".
    Without one, it ends before the word in which they differ.
    """
    limit = min(len(chosen), len(rejected))
    common = chosen[: next((i for i in range(limit) if chosen[i] != rejected[i]), limit)]
    name = common.rfind(_SPEAKER)
    if name >= 0:
        return name + len(_SPEAKER)
    if chosen == rejected:
        raise Unusable("chosen and rejected are the same text, so the prompt cannot be found")
    # Go back to the start of the word in which the texts differ. The whitespace before this word belongs to
    # the answer, so go back before it.
    cut = len(common)
    while cut and not chosen[cut - 1].isspace():
        cut -= 1
    cut = len(chosen[:cut].rstrip())
    if not cut:
        raise Unusable(
            "chosen and rejected begin with different words, so there is no prompt; add a prompt column"
        )
    return cut
