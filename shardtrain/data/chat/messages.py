"""Convert the conversations of rows to messages for chat templates."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from shardtrain.data.documents.columns import Unusable, check_text, column, find, kind
from shardtrain.utils import checked_json

Message = dict[str, Any]
Variables = Mapping[str, Any]
"""Variables of a chat template other than the messages: tools, and entries of the column chat_template_kwargs."""
NO_VARIABLES: Variables = MappingProxyType({})

# Maps speakers in ShareGPT's format to roles.
SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
KWARGS = "chat_template_kwargs"
_RESERVED = {
    "messages",
    "conversation",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
}
"""Arguments of ``apply_chat_template`` that a row must not set."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message that datasets and templates use for the reasoning."""


def conversation(
    row: Mapping[str, Any], messages_field: str, tools_field: str
) -> tuple[list[Message], Variables]:
    """Return the messages of a row, and the variables of the chat template.

    Raises:
        Unusable: the row has no conversation, or an invalid one.
    """
    messages_field = messages_column(row, messages_field)
    messages = messages_of(column(row, messages_field), messages_field)
    return messages, template_variables(row, tools_field)


def messages_column(row: Mapping[str, Any], messages_field: str) -> str:
    """Return the column of the conversation: ``messages_field``, or "conversations" in ShareGPT's format.

    A row is in ShareGPT's format if it has the column "conversations", but not the default column "messages".
    """
    is_sharegpt = messages_field == "messages" and "messages" not in row and "conversations" in row
    return "conversations" if is_sharegpt else messages_field


def template_variables(row: Mapping[str, Any], tools_field: str) -> dict[str, Any]:
    """Return the variables of a row for its chat template, like TRL.

    These are its tools, and the contents of its column ``chat_template_kwargs``. Variables that are null are
    ignored, because Arrow tables have every key in every row.

    Raises:
        Unusable: a column has the wrong type, or sets a variable that is reserved for the trainer.
    """
    kwargs = _json(find(row, KWARGS), KWARGS, "object")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise Unusable(f"column {KWARGS!r} holds {kind(kwargs)}, not an object")
    plain = _plain(kwargs or {}, f"column {KWARGS!r}")
    variables = {name: value for name, value in plain.items() if value is not None}
    reserved = sorted(_RESERVED & variables.keys())
    if reserved:
        raise Unusable(
            f"column {KWARGS!r} sets {reserved[0]!r}, which the trainer sets itself; remove it"
        )
    tools = variables.pop("tools", None) or find(row, tools_field)
    return {"tools": tools_of(tools, tools_field), **variables}


def messages_of(value: Any, name: str, has_images: bool = False) -> list[Message]:
    """Check a list of {role, content} or {from, value} objects, and return messages for chat templates.

    The content of a returned message is a text, or a list of at least two parts ``{"type": "text", "text":
    ...}``. With ``has_images``, a part may also be ``{"type": "image"}``. Keys with a null value are removed.
    Reasoning is stored under all keys that templates may read.

    Raises:
        Unusable: a message is invalid. The reason names the column and the message.
    """
    if not isinstance(value, list | tuple):
        raise Unusable(f"column {name!r} holds {kind(value)}, not a list of messages")
    if not value:
        raise Unusable("the conversation is empty", harmless=True)
    messages = []
    for number, message in enumerate(value, start=1):
        messages.append(_message(message, f"message {number} of column {name!r}", has_images))
    return messages


def tools_of(value: Any, name: str) -> list[Any] | None:
    """Return the tools that a conversation may call, or None if there are none.

    ``value`` is a list of objects, or a JSON text of such a list.

    Raises:
        Unusable: the value has a different type.
    """
    value = _json(value, name, "list of tools")
    if value is None:
        return None
    if isinstance(value, list | tuple):
        if not value:
            return None
        if all(isinstance(tool, Mapping) for tool in value):
            return [_plain(tool, f"column {name!r}") for tool in value]
    raise Unusable(f"column {name!r} holds {kind(value)}, not a list of tools")


def _json(value: Any, name: str, expected: str) -> Any:
    """Parse a value as JSON if it is a text, else return it unchanged. An empty text becomes None."""
    if not isinstance(value, str):
        return value
    try:
        checked_json.check_memory(value, checked_json.ROW_MEMORY_BYTES)
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError):
        raise Unusable(f"column {name!r} holds a text that is not a JSON {expected}") from None


def called_functions(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Yield the function of each tool call, a dict with its name and its arguments."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            yield call.get("function", call)


def with_object_arguments(messages: list[Message]) -> list[Message]:
    """Copy messages. Arguments of tool calls that are texts with a JSON object become dicts."""
    messages = copy.deepcopy(messages)
    for function in called_functions(messages):
        with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
            text = function["arguments"]
            if isinstance(text, str):
                checked_json.check_memory(text, checked_json.ROW_MEMORY_BYTES)
                arguments = json.loads(text)
                if isinstance(arguments, dict):
                    function["arguments"] = arguments
    return messages


def _message(value: Any, where: str, has_images: bool = False) -> Message:
    """Check a message, and return a copy that consists of plain dicts and lists.

    Raises:
        Unusable: the message is invalid. The reason begins with ``where``.
    """
    if not isinstance(value, Mapping):
        raise Unusable(f"{where} is {kind(value)}, not an object with role and content")
    if "role" not in value and "from" in value:
        return _from_sharegpt(value, where)
    # Ignore null values, because Arrow tables have every key in every message.
    message = {str(key): _plain(item, where) for key, item in value.items() if item is not None}
    role = message.get("role")
    if not isinstance(role, str) or not role:
        if role is None:
            raise Unusable(f"{where} has no role")
        raise Unusable(f"{where} has a role that is {kind(role)}")
    # Each tool call needs the name of a function. Remove an empty list of calls.
    calls = message.get("tool_calls")
    if calls is not None:
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            raise Unusable(f"{where} has tool_calls that are not a list of objects")
        for call in calls:
            function = call.get("function", call)
            if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
                raise Unusable(f"{where} has a tool call without the name of a function")
        if not calls:
            del message["tool_calls"]
    # A message must have a content, tool calls, or both.
    if "content" in message:
        message["content"] = _content(message["content"], where, has_images)
    elif "tool_calls" not in message:
        raise Unusable(f"{where} has neither content nor tool_calls")
    # Templates read the reasoning under different keys.
    # Store the first non-empty reasoning under all of them.
    reasonings = [message[key] for key in REASONING if key in message]
    for value in reasonings:
        if not isinstance(value, str):
            raise Unusable(f"{where} has a reasoning that is {kind(value)}, not a text")
    for reasoning in reasonings:
        if reasoning:
            return message | dict.fromkeys(REASONING, reasoning)
    return message


def joined(message: Message) -> Message:
    """Return the message. If its content is a list of parts, they are concatenated to one text."""
    parts = message.get("content")
    if not isinstance(parts, list):
        return message
    return message | {"content": "".join(part["text"] for part in parts)}


def _content(value: Any, where: str, has_images: bool) -> str | list[dict[str, Any]]:
    """Check the content of a message. Return it as a text if it has at most one part, which is a text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise Unusable(f"{where} has a content that is {kind(value)}, not a text")
    num_images = 0
    for part in value:
        if has_images and part == {"type": "image"}:
            num_images += 1
            continue
        if not isinstance(part, Mapping) or part.get("type", "text") != "text":
            part_type = part.get("type") if isinstance(part, Mapping) else kind(part)
            raise Unusable(
                f"{where} has a part of type {str(part_type)[:40]!r}; only text can be trained"
            )
        if not isinstance(part.get("text"), str):
            raise Unusable(f"{where} has a part of type 'text' without a text")
    if len(value) > 1 or num_images:
        return value
    return "".join(part["text"] for part in value)


def _from_sharegpt(value: Mapping[str, Any], where: str) -> Message:
    """Convert a message in ShareGPT's format."""
    speaker = value["from"]
    text = value.get("value")
    if not isinstance(text, str):
        if text is None:
            raise Unusable(f"{where} has no value")
        raise Unusable(f"{where} has a value that is {kind(text)}")
    # A tool call is a message whose text is JSON.
    if speaker == "function_call":
        try:
            checked_json.check_memory(text, checked_json.ROW_MEMORY_BYTES)
            call = json.loads(text)
        except (ValueError, RecursionError):
            call = None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise Unusable(
                f"{where} is a function_call whose value is not a JSON object with name and arguments"
            )
        function = {"name": call["name"], "arguments": call.get("arguments", {})}
        return {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    if speaker not in SPEAKERS:
        raise Unusable(
            f"{where} is from {str(speaker)[:40]!r}; known are {', '.join(SPEAKERS)}, function_call"
        )
    return {"role": SPEAKERS[speaker], "content": check_text(text, where)}


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """Copy nested objects and lists as plain dicts and lists.

    Templates must not get objects of other types, because they could call their methods.
    """
    if depth > 100:
        raise Unusable(f"{where} is nested more than 100 deep")
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, depth + 1) for item in value]
    if type(value) is str:
        return check_text(value, where)
    if value is None or type(value) in (int, float, bool):
        return value
    raise Unusable(f"{where} holds a {type(value).__name__}, which is not JSON")
