"""Learned text of published chat templates that have no ``{% generation %}`` blocks.

The reference is TRL's versions of these templates, which have such blocks.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from tiers import cases

from shardtrain.data.chat.chat_template import ChatTemplate
from shardtrain.data.chat.conversations import find_content_form, write
from shardtrain.data.chat.messages import Message, messages_of
from shardtrain.data.chat.turns import _common
from shardtrain.data.documents.columns import Unusable

pytest.importorskip("jinja2")

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASK = {"role": "user", "content": "What is it?"}
MORE = {"role": "user", "content": "And then?"}
SAY = {"role": "assistant", "content": "It is blue."}
THEN = {"role": "assistant", "content": "Then red."}
EMPTY = {"role": "assistant", "content": ""}
FUNCTION = {"name": "get_weather", "arguments": {"city": "Paris"}}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": FUNCTION}],
}
BARE_CALL = {
    **CALL,
    "tool_calls": [{"type": "function", "function": {"name": "get_weather", "arguments": {}}}],
}
RESULT = {"role": "tool", "name": "get_weather", "content": '{"degrees": "21 C"}'}
PARAMETERS = {
    "type": "object", "properties": {"city": {"type": "string", "description": "c"}}, "required": ["city"],
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS},
    }
]
THOUGHT = {**SAY, "reasoning_content": "Water."}
CHATS: dict[str, list[Message]] = {
    "one answer": [ASK, SAY],
    "two answers": [SYSTEM, ASK, SAY, MORE, THEN],
    "equal answers": [ASK, SAY, MORE, SAY],
    "a call": [ASK, CALL, RESULT, SAY],
    "a call at the end": [ASK, CALL],
    "a call in each of two rounds": [ASK, CALL, RESULT, SAY, MORE, CALL, RESULT, THEN],
    "two calls in a round": [ASK, CALL, RESULT, CALL, RESULT, SAY],
    "content with a call": [ASK, {**CALL, "content": "Let me see."}, RESULT, SAY],
    "an empty answer": [ASK, EMPTY],
    "an empty answer first": [ASK, EMPTY, MORE, THEN],
    "an empty answer last": [ASK, SAY, MORE, EMPTY],
    "reasoning": [ASK, THOUGHT, MORE, {**THEN, "reasoning_content": "Sunset."}],
    "reasoning with a call": [ASK, {**CALL, "reasoning_content": "Hm."}, RESULT, THOUGHT],
}
TRL = importlib.util.find_spec("trl")
FOLDER = Path(TRL.origin).parent / "chat_templates" if TRL and TRL.origin else Path("absent")
NAMES = sorted(file.stem for file in FOLDER.glob("*.jinja") if not file.stem.endswith("_training"))
FIRST = ["deepseekv3", "gemma4", "gptoss", "nemotron_3_nano", "phi3", "phi3_5", "qwen3"]


@pytest.mark.skipif(not NAMES, reason="trl is not installed (the dev extra has it)")
@pytest.mark.parametrize(
    "name", cases(FIRST, nightly=[name for name in NAMES if name not in FIRST])
)
def test_turns_of_published_templates_match_the_marks_of_trl(name: str) -> None:
    """Ignore spaces around a turn, and the generation prompt, which TRL learns for some templates."""
    template = _template(FOLDER / f"{name}.jinja")
    marked_file = FOLDER / f"{name.split('_v')[0]}_training.jinja"
    header = _header(template)
    for chat_name, chat in CHATS.items():
        messages = messages_of(chat, "messages")
        has_tools = any(message["role"] == "tool" for message in chat)
        has_tools = has_tools or chat_name == "a call at the end"
        variables = {"tools": TOOLS if has_tools else None}
        try:
            written = write(template, messages, variables)
        except Unusable as error:
            assert "told apart" not in error.reason, (chat_name, error.reason)
            continue  # the template does not support tools or reasoning, or rejects the conversation
        if template.marks or not marked_file.is_file():
            continue
        marked_template = _template(marked_file, template.content_as_parts)
        text, spans = marked_template.render_marked(messages, variables)
        if text != written.text:
            continue  # TRL changed more than the {% generation %} blocks, so it is no reference here

        turns = [written.text[start:stop] for start, stop in written.spans]
        learned = "".join(turns).replace("<|tool_response>", "")  # Gemma's token after a tool call
        expected = "".join(text[start:stop] for start, stop in spans)
        for piece in header:
            expected = expected.replace(piece, "")
            learned = learned.replace(piece, "")
        assert "".join(learned.split()) == "".join(expected.split()), (chat_name, turns, expected)


def _template(file: Path, as_parts: bool | None = None) -> ChatTemplate:
    template = ChatTemplate(file.read_text(encoding="utf-8"), SPECIAL)
    if as_parts is None:
        find_content_form(template)
    else:
        template.content_as_parts = as_parts
    return template


def _header(template: ChatTemplate) -> list[str]:
    """Return the generation prompt and its tokens, which the comparison ignores."""
    without_prompt = template.render([ASK])
    with_prompt = template.render([ASK], {}, True)
    prompt = with_prompt[_common(with_prompt, without_prompt) :].strip()
    return [prompt, *re.findall("<[^<>]*>", prompt)]


PROMPT = "{% if add_generation_prompt %}<|h|>assistant<|/h|>{% endif %}"
LINE = "<|h|>{{ m.role }}<|/h|>{{ m.content }}"
VICUNA = (
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} "
    "{% else %}ASSISTANT: {{ m.content }}</s>{% endif %}{% endfor %}"
)
INST = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
OWN: dict[str, tuple[str, list[Message], list[str]]] = {
    "an end token after the last turn only": (
        "{% for m in messages %}" + LINE + "<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|h|>assistant<|/h|>{% else %}{{ eos_token }}{% endif %}",
        [ASK, SAY, MORE, THEN],
        ["It is blue.<|end|>\n", "Then red.<|end|>\n</s>"],
    ),
    "the last turn has a different end": (
        "{% for m in messages %}"
        + LINE
        + "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        + PROMPT,
        [ASK, SAY, MORE, THEN],
        ["It is blue.<|end|>", "Then red.<|return|>"],
    ),
    "the last turn thinks": (
        "{% for m in messages %}<|h|>{{ m.role }}<|/h|>{{ '<think></think>' if loop.last }}{{ m.content }}<|end|>"
        "{% endfor %}" + PROMPT,
        [ASK, EMPTY, MORE, THEN],
        ["<|end|>", "<think></think>Then red.<|end|>"],
    ),
    "thinking within the content is cut from earlier turns": (
        "{% for m in messages %}<|h|>{{ m.role }}<|/h|>"
        "{{ m.content if loop.last else m.content.split('</think>')[-1].strip() }}<|end|>{% endfor %}"
        + PROMPT,
        [
            ASK,
            {**SAY, "content": "<think>Hm.</think>\n\nBlue."},
            MORE,
            {**THEN, "content": "<think>Ah.</think>Red."},
        ],
        ["Blue.<|end|>", "<think>Ah.</think>Red.<|end|>"],
    ),
    "an empty answer after thinking, where templates strip answers": (
        "{% for m in messages %}<|h|>{{ m.role }}<|/h|>"
        "{% if loop.last and '</think>' in m.content %}{{ m.content.split('</think>')[0] }}</think>\n\n{% endif %}"
        "{{ m.content.split('</think>')[-1].lstrip() }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        + PROMPT,
        [
            ASK,
            {**SAY, "content": "<think>Hm.</think>\n\n"},
            MORE,
            {**THEN, "content": "<think>Ah.</think>\n\n"},
        ],
        ["<|end|>", "<think>Ah.</think>\n\n<|return|>"],
    ),
    "a tool's result within the turn": (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}<|model|>"
        "{% elif m.tool_calls is defined %}<|call|>{{ m.tool_calls[0].function.name }}<|/call|>"
        "<|response|>{{ (messages[loop.index] | default({})).content }}<|/response|>{{ m.content }}"
        "{% elif m.role == 'assistant' %}{{ m.content }}<|end|>{% endif %}{% endfor %}",
        [ASK, {**BARE_CALL, "content": "Let me see."}, RESULT, SAY],
        ["<|call|>get_weather<|/call|><|response|>", "Let me see.", "It is blue.<|end|>"],
    ),
    "the name of a call twice, and its result as JSON": (
        "{% for m in messages %}<|h|>{{ m.role }}<|/h|>{% if m.tool_calls is defined %}"
        "{{ '<think></think>' if loop.last }}to={{ m.tool_calls[0].function.name }}<|call|>"
        "{{ m.tool_calls[0].function.name }}(){{ m.content }}{% elif m.role == 'tool' %}{{ m.content | tojson }}"
        "{% else %}{{ m.content }}{% endif %}<|end|>{% endfor %}" + PROMPT,
        [ASK, BARE_CALL, RESULT, SAY],
        ["to=get_weather<|call|>get_weather()<|end|>", "It is blue.<|end|>"],
    ),
    "a call without a generation prompt": (
        "{% for m in messages %}<|h|>{{ m.role }}<|/h|>{% if m.tool_calls is defined %}"
        "<|call|>{{ m.tool_calls[0].function.name }}{% endif %}{{ m.content }}<|end|>{% endfor %}",
        [ASK, BARE_CALL, RESULT, SAY],
        ["<|call|>get_weather<|end|>", "It is blue.<|end|>"],
    ),
    "an answer that the speaker's name begins with": (
        VICUNA,
        [ASK, {**SAY, "content": "A"}],
        ["A</s>"],
    ),
    "an answer that is the speaker's name": (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>\n{% endfor %}",
        [ASK, {**SAY, "content": "assistant"}, MORE, {**SAY, "content": "a"}],
        ["assistant</s>\n", "a</s>\n"],
    ),
    "an answer that the header begins with": (
        "{% for m in messages %}" + LINE + "<|end|>{% endfor %}",
        [ASK, {**SAY, "content": "<|h|>"}],
        ["<|h|><|end|>"],
    ),
    "an empty answer without a generation prompt": (
        VICUNA,
        [ASK, EMPTY, MORE, EMPTY],
        ["</s>", "</s>"],
    ),
    "an empty answer after a space": (INST, [ASK, EMPTY, MORE, THEN], [" </s>", " Then red.</s>"]),
    "a space before each answer, and earlier questions in a different form": (
        INST.replace(
            "{{ m.content }} [",
            "{{ 'Be brief. ' if loop.index > messages | length - 2 }}{{ m.content }} [",
        ),
        [ASK, SAY, MORE, EMPTY],
        [" It is blue.</s>", " </s>"],
    ),
}


@pytest.mark.parametrize(("template", "chat", "expected"), OWN.values(), ids=OWN.keys())
def test_turns_are_located_if_templates_render_turns_differently(
    template: str, chat: list[Message], expected: list[str]
) -> None:
    written: Any = write(ChatTemplate(template, SPECIAL), messages_of(chat, "messages"))
    assert [written.text[start:stop] for start, stop in written.spans] == expected


def test_hostile_thinking_block_is_parsed_in_linear_time() -> None:
    """A pattern with two runs of spaces would take minutes."""
    content = "<think>" + " " * 200_000
    template = ChatTemplate(
        "{% for m in messages %}" + LINE + "<|end|>{% endfor %}" + PROMPT, SPECIAL
    )
    written = write(template, messages_of([ASK, {**SAY, "content": content}], "messages"))

    assert [written.text[start:stop] for start, stop in written.spans] == [content + "<|end|>"]
