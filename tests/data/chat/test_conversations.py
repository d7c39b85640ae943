"""Conversations get the tokens and masks of transformers. A turn that cannot be located makes a bad row."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_tokenizers import bpe_folder, sentencepiece_bytes, tiktoken_bytes

from shardtrain.config.schema import Data
from shardtrain.data.chat.chat_template import ChatTemplate
from shardtrain.data.chat.conversations import write
from shardtrain.data.documents.columns import Unusable
from shardtrain.data.documents.encode import end_tokens, open_conversations, open_encoder
from shardtrain.data.documents.encoded import Document
from shardtrain.data.sources import BadRow
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.tools.generate.prompts import GenerationPrompts, PromptRow
from shardtrain.utils.errors import ConfigError

pytest.importorskip("jinja2")

SPECIAL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|h|>",
    "<|/h|>",
    "<|eot|>",
    "<|user|>",
    "<|assistant|>",
)

# Templates in the style of model families, with {% generation %} marks. Without marks, the prefix method must agree.
CHATML = """\
{% if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{% for m in messages %}
{% if m.role == 'assistant' %}
<|im_start|>assistant
{% generation %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}
<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>{% endgeneration %}

{% else %}
<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

HEADERS = """\
{{- bos_token }}
{%- for m in messages %}
{{- '<|h|>' + m['role'] + '<|/h|>\\n\\n' }}
{%- if m['role'] == 'assistant' %}
{%- generation %}
{%- if m.tool_calls is defined %}{{- m.tool_calls[0].function | tojson }}
{%- else %}{{- m['content'] | trim }}{%- endif %}
{{- '<|eot|>' }}
{%- endgeneration %}
{%- else %}
{{- m['content'] | trim + '<|eot|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|h|>assistant<|/h|>\\n\\n' }}{%- endif %}"""

ZEPHYR = """\
{% for m in messages %}
{% if m['role'] == 'assistant' %}
{{ '<|assistant|>\\n' }}{% generation %}{{ m['content'] + eos_token }}{% endgeneration %}{{ '\\n' }}
{% else %}
{{ '<|user|>\\n' + m['content'] + eos_token + '\\n' }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>\\n' }}
{% endif %}
{% endfor %}"""

INST = """\
{{- bos_token }}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{- ' [INST] ' + m['content'] + ' [/INST]' }}
{%- elif m['role'] == 'assistant' %}
{%- generation %}{{- ' ' + m['content'] + eos_token }}{%- endgeneration %}
{%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}
{%- endif %}
{%- endfor %}"""

TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "zephyr": ZEPHYR, "inst": INST}
TURNS = [
    {"role": "user", "content": "Hello! How are you today?"},
    {"role": "assistant", "content": "  I am well,\nthank you. 🦜"},
    {"role": "user", "content": "the cat 東京"},
    {"role": "assistant", "content": "naïve café <|x|> {{ }} \n\n"},
]
CALL = {
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
]
WITH_TOOLS = [
    {"role": "user", "content": "weather in Paris?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '{"celsius": 21}'},
    {"role": "assistant", "content": "21 degrees"},
    {"role": "user", "content": "thank you"},
    {"role": "assistant", "content": "Hello"},
]


def without_marks(template: str) -> str:
    for mark in (
        "{% generation %}",
        "{%- generation %}",
        "{% endgeneration %}",
        "{%- endgeneration %}",
    ):
        template = template.replace(mark, "")
    # trim_blocks would have removed the newline after the deleted tag, so delete that newline here
    return template.replace("<|im_end|>\n\n{% else %}", "<|im_end|>\n{% else %}")


def folder_of(tmp_path, template, **more):
    return bpe_folder(
        tmp_path, SPECIAL, bos_token="<s>", eos_token="</s>", chat_template=template, **more
    )


def encode(path, row, **options):
    (result,) = open_encoder(open_tokenizer(str(path)), Data(format="chat", **options)).encode(
        [row]
    )
    return result


def learned_text(path, row, **options):
    document = encode(path, row, **options)
    assert isinstance(document, Document), document
    tokenizer = open_tokenizer(str(path))
    runs = []
    last = False
    for token, learned in zip(document.tokens.tolist(), document.learned.tolist(), strict=True):
        if learned:
            runs[-1:] = [[*runs[-1], token]] if last else [*runs[-1:], [token]]
        last = learned
    return [tokenizer.decode(run, keep_special=True) for run in runs]


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("chat", ["turns", "tools"])
def test_tokens_and_masks_match_transformers(tmp_path, style, chat):
    transformers = pytest.importorskip("transformers")
    if chat == "tools" and style in ("zephyr", "inst"):
        pytest.skip("this style has no tools")
    messages, tools = (TURNS, None) if chat == "turns" else (WITH_TOOLS, TOOLS)
    path = folder_of(tmp_path, TEMPLATES[style])
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(path))
    # transformers locates a span by the offset of its first character, which may be a space that offsets exclude
    reference.backend_tokenizer.post_processor = open_tokenizer(str(path))._tokenizer.post_processor
    expected = reference.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True
    )
    document = encode(path, {"messages": messages, "tools": tools})

    assert document.tokens.tolist() == expected["input_ids"]
    assert document.learned.astype(int).tolist() == expected["assistant_masks"]
    assert 0 < document.learned.sum() < len(document.tokens)


@pytest.mark.parametrize("style", TEMPLATES)
@pytest.mark.parametrize("chat", ["turns", "tools"])
def test_turns_are_the_same_with_and_without_marks(tmp_path, style, chat):
    if chat == "tools" and style in ("zephyr", "inst"):
        pytest.skip("this style has no tools")
    row = {"messages": TURNS} if chat == "turns" else {"messages": WITH_TOOLS, "tools": TOOLS}
    marked = encode(folder_of(tmp_path / "marked", TEMPLATES[style]), row)
    plain = encode(folder_of(tmp_path / "plain", without_marks(TEMPLATES[style])), row)

    assert plain.tokens.tolist() == marked.tokens.tolist()
    assert plain.learned.tolist() == marked.learned.tolist()


def test_assistant_text_and_end_of_turn_are_learned(tmp_path):
    path = folder_of(tmp_path, without_marks(CHATML))
    assert learned_text(path, {"messages": TURNS}) == [
        "  I am well,\nthank you. 🦜<|im_end|>",
        "naïve café <|x|> {{ }} \n\n<|im_end|>",
    ]

    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "unit": "celsius"}}</tool_call><|im_end|>'
    row = {"messages": WITH_TOOLS, "tools": TOOLS}
    assert learned_text(path, row) == [call, "21 degrees<|im_end|>", "Hello<|im_end|>"]


@pytest.mark.parametrize("kind", ["sentencepiece", "tiktoken"])
def test_other_tokenizers_learn_the_same_text(tmp_path, kind):
    end = "<|eot_id|>" if kind == "tiktoken" else "</s>"
    (tmp_path / "tokenizer.model").write_bytes(
        tiktoken_bytes() if kind == "tiktoken" else sentencepiece_bytes()
    )
    template = (
        "{% for m in messages %}"
        + (
            "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' }}"
            if kind == "tiktoken"
            else "{{ m.role + ':' }}"
        )
        + "{{ m.content }}"
        + end
        + "{% endfor %}{% if add_generation_prompt %}"
        + (
            "{{ '<|start_header_id|>assistant<|end_header_id|>' }}"
            if kind == "tiktoken"
            else "assistant:"
        )
        + "{% endif %}"
    )
    (tmp_path / "chat_template.jinja").write_text(template)
    expected = [message["content"] + end for message in TURNS if message["role"] == "assistant"]
    # sentencepiece drops the space before the first word of a text it decodes
    learned = learned_text(tmp_path, {"messages": TURNS})

    assert [text.lstrip() for text in learned] == [text.lstrip() for text in expected]


def test_bos_from_the_template_appears_once(tmp_path):
    document = encode(folder_of(tmp_path, HEADERS), {"messages": TURNS})
    bos = open_tokenizer(str(tmp_path)).bos_id
    assert document.tokens[0] == bos
    assert (document.tokens == bos).sum() == 1

    document = encode(folder_of(tmp_path, CHATML), {"messages": TURNS})
    assert (document.tokens == bos).sum() == 0


# like templates of reasoning models, writes a block only in the last turn and not in earlier ones
UNSTABLE = """\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and loop.last %}{{ '<think></think>' }}{% endif %}
{{- m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def test_turns_are_located_if_the_template_rewrites_earlier_ones(tmp_path):
    path = folder_of(tmp_path, UNSTABLE)
    chat = [*TURNS[:3], {"role": "assistant", "content": "Hello"}]
    expected = ["  I am well,\nthank you. 🦜<|im_end|>", "<think></think>Hello<|im_end|>"]
    assert learned_text(path, {"messages": chat}) == expected


def test_turn_that_cannot_be_located_is_a_bad_row(tmp_path):
    path = folder_of(tmp_path, UNSTABLE.replace("m.content +", "m.content | lower +"))
    result = encode(path, {"messages": TURNS})
    assert isinstance(result, BadRow)
    assert not result.harmless
    assert "turn 2 cannot be located" in result.reason
    assert "data.chat_template" in result.reason
    assert "{% generation %}" in result.reason


def test_role_header_is_not_learned_without_a_generation_prompt(tmp_path):
    path = folder_of(
        tmp_path,
        "{% for m in messages %}{{ '<|h|>' + m.role + '<|/h|>' + m.content + '<|eot|>' }}{% endfor %}",
    )

    assert learned_text(path, {"messages": TURNS[:2]}) == ["  I am well,\nthank you. 🦜<|eot|>"]


def test_marks_within_a_macro_are_located(tmp_path):
    template = (
        "{% macro say(m) %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}{{ say(m) }}{% else %}{{ m.content }}"
        "{% endif %}\n{% endfor %}"
    )
    path = folder_of(tmp_path, template)

    assert learned_text(path, {"messages": TURNS[:2]}) == ["  I am well,\nthank you. 🦜</s>"]


def test_marks_around_text_that_is_changed_later_are_rejected():
    template = ChatTemplate(
        "{{ messages[0].content }}{% set x %}{% generation %} {{ messages[1].content }} {% endgeneration %}{% endset %}"
        "{{ x | trim }}",
        {},
    )

    with pytest.raises(Unusable, match="changes the text inside its"):
        write(template, TURNS[:2])


def test_marks_that_exclude_the_end_token_are_logged(tmp_path, caplog):
    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<|eot|>{% endfor %}"
    path = folder_of(tmp_path, template)
    encoder = open_encoder(open_tokenizer(str(path)), Data(format="chat"))
    encoder.encode([{"messages": TURNS}, {"messages": TURNS}])

    (message,) = [record.getMessage() for record in caplog.records]
    assert "exclude the end token <|eot|>" in message


def test_sharegpt_rows_become_messages(tmp_path):
    path = folder_of(tmp_path, CHATML)
    speakers = {"user": "human", "assistant": "gpt"}
    row = {"conversations": [{"from": speakers[m["role"]], "value": m["content"]} for m in TURNS]}
    expected = encode(path, {"messages": TURNS})

    for document in (
        encode(path, row),
        encode(path, {"talk": row["conversations"]}, messages_field="talk"),
    ):
        assert document.tokens.tolist() == expected.tokens.tolist()
        assert document.learned.tolist() == expected.learned.tolist()

    # ShareGPT has speakers for calls of functions and for their results.
    call = {
        "from": "function_call",
        "value": '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    }
    row["conversations"] += [
        {"from": "human", "value": "Paris?"},
        call,
        {"from": "observation", "value": "21"},
    ]

    assert '"arguments": {"city": "Paris"}' in learned_text(path, row)[-1]


def test_text_parts_nulls_and_json_tools_are_equivalent_forms(tmp_path):
    path = folder_of(tmp_path, CHATML)
    expected = encode(path, {"messages": WITH_TOOLS, "tools": TOOLS})
    parts = [
        {
            **m,
            "name": None,
            "content": [{"type": "text", "text": m["content"]}] if m["content"] else None,
        }
        for m in WITH_TOOLS
    ]
    text_call = {
        "type": "function",
        "function": {**CALL["function"], "arguments": json.dumps(CALL["function"]["arguments"])},
    }
    # arguments as a JSON string, as in OpenAI's format; the template must not quote it again
    parts[1]["tool_calls"] = [text_call]
    document = encode(path, {"messages": parts, "tools": json.dumps(TOOLS)})

    assert document.tokens.tolist() == expected.tokens.tolist()
    assert document.learned.tolist() == expected.learned.tolist()


def test_template_that_expects_arguments_as_text_gets_text():
    template = ChatTemplate(
        "{% for m in messages %}{% set f = m.tool_calls[0].function %}{{ m.content + f.arguments + '!' + f.name }}"
        "{% endfor %}",
        {},
    )
    call = {"function": {"name": "f", "arguments": '{"a":1}'}}
    message = {"role": "assistant", "content": "x", "tool_calls": [call]}

    assert write(template, [message]).text == 'x{"a":1}!f'


USER = {"role": "user", "content": "a"}
BAD = {
    "missing": ({"text": "x", "id": 1}, "has no column 'messages'; its columns are text, id"),
    "null": ({"messages": None}, "column 'messages' holds null, not a list of messages"),
    "text": ({"messages": "hello"}, "column 'messages' holds a text"),
    "element": ({"messages": ["hello"]}, "message 1 of column 'messages' is a text, not an object with role"),
    "role": ({"messages": [{"content": "x"}]}, "message 1 of column 'messages' has no role"),
    "role type": ({"messages": [{"role": 3, "content": "x"}]}, "has a role that is a number"),
    "content": ({"messages": [USER, {"role": "assistant"}]}, "message 2 of column 'messages' has neither content nor"),
    "content type": ({"messages": [{"role": "user", "content": 4}]}, "has a content that is a number, not a text"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "part of type 'image'; only text"),
    "part": ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "part of type 'text' without a text"),
    "assistant": ({"messages": [USER]}, "the conversation has no turn of the assistant"),
    "surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, "has a lone surrogate"),
    "mark": ({"messages": [USER, {"role": "assistant", "content": "\ufdd0"}]}, "noncharacter"),
    "speaker": ({"conversations": [{"from": "alien", "value": "x"}]}, "is from 'alien'; known are human, user, gpt"),
    "value": ({"conversations": [{"from": "gpt"}]}, "has no value"),
    "call": ({"conversations": [{"from": "function_call", "value": "x"}]}, "is not a JSON object with name"),
    "tool call": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "without the name of a function"),
    "tool calls": ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, "tool_calls that are not a list"),
    "reasoning": ({"messages": [USER, {**USER, "thinking": 0}]}, "message 2 of column 'messages' has a reasoning"),
    "tools": ({"messages": TURNS, "tools": "x"}, "column 'tools' holds a text that is not a JSON list"),
    "tools type": ({"messages": TURNS, "tools": [3]}, "column 'tools' holds a list, not a list of tools"),
    "bytes": ({"messages": [{"role": "user", "content": b"x"}]}, "holds a bytes, which is not JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_invalid_conversations_are_bad_rows_with_a_reason(tmp_path, name):
    row, reason = BAD[name]
    result = encode(folder_of(tmp_path, CHATML), row)
    assert isinstance(result, BadRow)
    assert reason in result.reason
    assert not result.harmless
    assert "\n" not in result.reason


def test_empty_conversation_is_harmless_and_a_deeply_nested_one_is_rejected(tmp_path):
    path = folder_of(tmp_path, CHATML)
    assert encode(path, {"messages": []}) == BadRow("the conversation is empty", harmless=True)

    deep: object = "x"
    for _ in range(5000):
        deep = [deep]

    assert (
        "nested more than 100 deep"
        in encode(path, {"messages": [{"role": "user", "content": deep}]}).reason
    )


def test_exception_raised_by_the_template_is_the_reason(tmp_path):
    result = encode(
        folder_of(tmp_path, INST), {"messages": [{"role": "system", "content": "x"}, *TURNS]}
    )

    assert (
        result.reason
        == "the chat template refuses the conversation: Only user and assistant roles are supported!"
    )


def test_missing_chat_template_is_an_error_with_the_option(tmp_path):
    path = bpe_folder(tmp_path, SPECIAL)
    with pytest.raises(
        ConfigError,
        match=r"data.chat_template is not set, and the tokenizer has no chat template; name",
    ):
        open_encoder(open_tokenizer(str(path)), Data(format="chat"))
    with pytest.raises(ConfigError, match=r"data.chat_template=.*is not a file"):
        open_encoder(
            open_tokenizer(str(path)), Data(format="chat", chat_template=str(tmp_path / "absent"))
        )

    (tmp_path / "broken.jinja").write_text("{% for x in %}")
    with pytest.raises(
        ConfigError, match=r'data.chat_template=".*broken.jinja" is not a Jinja template \(line 1'
    ):
        open_encoder(
            open_tokenizer(str(path)),
            Data(format="chat", chat_template=str(tmp_path / "broken.jinja")),
        )


def test_template_that_drops_a_tool_call_makes_a_bad_row(tmp_path):
    messages = [
        {**message, "content": message["content"] or "let me get_weather"} for message in WITH_TOOLS
    ]
    result = encode(folder_of(tmp_path, ZEPHYR), {"messages": messages, "tools": TOOLS})

    assert isinstance(result, BadRow)
    assert "drops the tool call of turn 2" in result.reason


def test_option_overrides_the_template_of_the_tokenizer(tmp_path):
    path = folder_of(tmp_path, CHATML)
    (tmp_path / "own.jinja").write_text(ZEPHYR)
    tokenizer = open_tokenizer(str(path))
    with_template, without_template = (
        Data(format="chat", chat_template=name) for name in (str(tmp_path / "own.jinja"), None)
    )

    assert (
        open_encoder(tokenizer, with_template).fingerprint
        != open_encoder(tokenizer, without_template).fingerprint
    )
    assert learned_text(
        path, {"messages": TURNS[:2]}, chat_template=str(tmp_path / "own.jinja")
    ) == ["  I am well,\nthank you. 🦜</s>"]


def test_conversations_with_tools_use_the_template_for_tools(tmp_path):
    named = [{"name": "default", "template": ZEPHYR}, {"name": "tool_use", "template": CHATML}]
    path = folder_of(tmp_path, named)
    assert learned_text(path, {"messages": TURNS[:2]})[0].endswith("</s>")
    assert learned_text(path, {"messages": TURNS[:2], "tools": TOOLS})[0].endswith("<|im_end|>")


def test_strftime_now_is_a_fixed_date(caplog):
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {})
    assert template.render(TURNS) == template.render(TURNS) == "26 Jul 2024"
    assert len(caplog.records) == 1
    assert "2024-07-26" in caplog.text


HOSTILE = {
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "mutation": "{{ messages.append(1) }}",
    "product": "{{ 'a' * 10**12 }}",
    "power": "{{ 10 ** 10**9 }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "rounds": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "output": "{% set a = 'a' * 1000000 %}{% for i in range(1000) %}{{ a }}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "undefined": "{{ messages[99].content.x }}",
    "import": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_rejected_with_a_reason(name):
    with pytest.raises(Unusable, match="the chat template (refuses|writes)"):
        ChatTemplate(HOSTILE[name], {}).render(TURNS)


def test_batched_rows_encode_like_single_rows(tmp_path):
    path = folder_of(tmp_path, without_marks(CHATML))
    rows = [
        {"messages": TURNS},
        {"messages": 3},
        {"messages": WITH_TOOLS, "tools": TOOLS},
        {"messages": TURNS[:2]},
    ]
    encoder = open_encoder(open_tokenizer(str(path)), Data(format="chat"))
    for row, document in zip(rows, encoder.encode(rows), strict=True):
        (alone,) = encoder.encode([row])
        if isinstance(alone, BadRow):
            assert document == alone
        else:
            assert np.array_equal(document.tokens, alone.tokens)
            assert np.array_equal(document.learned, alone.learned)

    assert encoder.encode([]) == []


# Template, messages, and the dropped text (None if it drops none)
SMOLVLM = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TYPO = CHATML.replace("content", "contents")
NO_USER = """\
{% for m in messages %}<|{{ m.role }}|>{% if m.role != 'user' %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"""
NO_SYSTEM = NO_USER.replace("m.role != 'user'", "m.role != 'system'")
NO_TOOL = NO_USER.replace("m.role != 'user'", "m.role != 'tool'")
EMPTY_MARKS = """\
{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|eot|>{% endgeneration %}\
{% else %}{{ m.content }}{% endif %}{% endfor %}"""
NO_REASONING = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|eot|>{% endfor %}"
LAST_REASONING = """\
{% for m in messages %}<|{{ m.role }}|>{% if loop.last and m.reasoning_content is defined %}\
<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|eot|>{% endfor %}"""
LAST_OF_THINKING = NO_REASONING.replace("m.content", "m.content.split('</think>')[-1]")
CUT = NO_REASONING.replace("m.content", "m.content[:60]")
NO_COMMAND = NO_REASONING.replace("m.content", "m.content | replace('/no_think', '')")
NAMES_OF_CALLS = NO_REASONING.replace(
    "<|eot|>", "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}<|eot|>"
)
ANSWER = {"role": "assistant", "content": "Blue."}
TEXT_CALL = {"function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
THOUGHT = {**ANSWER, "reasoning_content": "Water is blue."}
TOOL_RESULT = {"role": "tool", "content": "18 degrees"}
DROPPED = {
    "contents as parts": (SMOLVLM, [USER, ANSWER], None),
    "a typo in the name of the content": (TYPO, [USER, ANSWER], "the content of turn 1"),
    "no user": (NO_USER, [USER, ANSWER], "the content of turn 1"),
    "no system prompt": (
        NO_SYSTEM,
        [{"role": "system", "content": "Be brief."}, USER, ANSWER],
        "the content of turn 1",
    ),
    "no system prompt in the row": (NO_SYSTEM, [USER, ANSWER], None),
    "no tool result": (NO_TOOL, [USER, ANSWER, TOOL_RESULT, ANSWER], "the content of turn 3"),
    "marks around nothing": (EMPTY_MARKS, [USER, ANSWER], "the content of turn 2"),
    "no reasoning": (NO_REASONING, [USER, THOUGHT], "the reasoning of turn 2"),
    "a thinking block of the last content": (
        LAST_OF_THINKING,
        [USER, {**ANSWER, "content": "<think>Hm.</think>Blue."}],
        "the reasoning of turn 2",
    ),
    "a thought of the last content without an opening tag": (
        LAST_OF_THINKING,
        [USER, {**ANSWER, "content": "Hm.</think>Blue."}],
        "a part of the content of turn 2",
    ),
    "a text before a thinking block": (
        LAST_OF_THINKING,
        [USER, {**ANSWER, "content": "Well. <think>Hm.</think>Blue."}],
        "a part of the content of turn 2",
    ),
    "a thought of an earlier content": (
        LAST_OF_THINKING,
        [USER, {**ANSWER, "content": "Hm.</think>Blue."}, USER, ANSWER],
        None,
    ),
    "the end of a question": (
        CUT,
        [{**USER, "content": "a" * 61}, ANSWER],
        "a part of the content of turn 1",
    ),
    "the end of an answer": (
        CUT,
        [USER, {**ANSWER, "content": "a" * 61}],
        "a part of the content of turn 2",
    ),
    "the end of an earlier answer": (
        CUT,
        [USER, {**ANSWER, "content": "a" * 61}, USER, ANSWER],
        "a part of the content of turn 2",
    ),
    "contents that are not truncated": (CUT, [{**USER, "content": "a" * 60}, ANSWER], None),
    "a command to the template": (NO_COMMAND, [{**USER, "content": "a /no_think"}, ANSWER], None),
    "the arguments of a tool call": (
        NAMES_OF_CALLS,
        [USER, {**ANSWER, "tool_calls": [CALL]}],
        "an argument of the tool calls of turn 2",
    ),
    "the arguments of a tool call as text": (
        NAMES_OF_CALLS,
        [USER, {**ANSWER, "tool_calls": [TEXT_CALL]}],
        "an argument of the tool calls of turn 2",
    ),
    "a tool call without arguments": (
        NAMES_OF_CALLS,
        [USER, {**ANSWER, "tool_calls": [{"function": {"name": "now", "arguments": {}}}]}],
        None,
    ),
    "reasoning of the last turn only": (LAST_REASONING, [USER, THOUGHT, USER, THOUGHT], None),
    "an empty answer": (CHATML, [USER, {"role": "assistant", "content": ""}, USER, ANSWER], None),
}


@pytest.mark.parametrize("form", ["chat", "prompt_completion"])
@pytest.mark.parametrize(("template", "messages", "dropped"), DROPPED.values(), ids=DROPPED.keys())
def test_conversation_with_text_that_the_template_drops_is_a_bad_row(
    tmp_path, template, messages, dropped, form
):
    """Training on such a row would teach only ends of turns, or answers to empty questions."""
    row = {"messages": messages}
    if form == "prompt_completion":
        row = {"prompt": messages[:-1], "completion": messages[-1:]}
    tokenizer = open_tokenizer(str(folder_of(tmp_path, template)))
    (result,) = open_encoder(tokenizer, Data(format=form)).encode([row])
    if dropped is not None:
        assert isinstance(result, BadRow)
        assert result.reason == f"the chat template drops {dropped}; use a template that writes it"
        return

    assert isinstance(result, Document), result
    assert "Blue." in tokenizer.decode(result.tokens[result.learned])

    # The row contains the text of each message, but neither its reasoning nor "/no_think".
    decoded = tokenizer.decode(result.tokens)
    for message in messages:
        text = message["content"].split("</think>")[-1].removesuffix("/no_think")
        assert text in decoded


REASONING = ("reasoning_content", "thinking", "reasoning")


@pytest.mark.parametrize("read", REASONING)
@pytest.mark.parametrize("key", REASONING)
def test_reasoning_is_passed_under_the_key_that_the_template_reads(tmp_path, key, read):
    """In Arrow tables every message has every key, so an empty reasoning must count as absent."""
    path = folder_of(
        tmp_path,
        LAST_REASONING.replace("reasoning_content is defined", read).replace(
            "reasoning_content", read
        ),
    )
    tokenizer = open_tokenizer(str(path))
    thought, no_thought = (
        {**ANSWER, **dict.fromkeys(REASONING, ""), key: text} for text in ("Water is blue.", "")
    )
    rows = [{"messages": [USER, message]} for message in (thought, no_thought, thought)]
    documents = open_encoder(tokenizer, Data(format="chat")).encode(rows)
    expected = ["<think>Water is blue.</think>Blue.", "Blue.", "<think>Water is blue.</think>Blue."]

    assert [
        tokenizer.decode(message.tokens[message.learned]).removesuffix("<|eot|>")
        for message in documents
    ] == expected


def test_empty_reasoning_is_accepted_by_a_template_without_reasoning(tmp_path):
    encoder = open_encoder(
        open_tokenizer(str(folder_of(tmp_path, NO_REASONING))), Data(format="chat")
    )
    thought, empty = encoder.encode(
        [{"messages": [USER, {**ANSWER, "reasoning_content": text}]} for text in ("Hm.", "")]
    )

    assert isinstance(thought, BadRow)
    assert isinstance(empty, Document)


# In the style of Gemma 3, and of templates that write each part on its own line
TRIMMED_PARTS = """\
{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content | trim }}{% else %}\
{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}<|eot|>{% endfor %}\
{% if add_generation_prompt %}<|assistant|>{% endif %}"""
LINES = TRIMMED_PARTS.replace("part.text | trim }}", "part.text }}{{ '\\n' if not loop.last }}")
FIRST_PART = SMOLVLM.replace(
    "{% for part in message.content %}", "{% for part in message.content[:1] %}"
)
PARTS = {
    "trimmed": (TRIMMED_PARTS, "xyz"),
    "lines": (LINES, "x \n y\n\nz"),
    "parts only": (SMOLVLM, "x  y\nz"),
    "the first part only": (FIRST_PART, "x  y\nz"),
    "texts only": (NO_REASONING, "x  y\nz"),
}


@pytest.mark.parametrize("form", ["chat", "prompt_completion"])
@pytest.mark.parametrize(("template", "learned"), PARTS.values(), ids=PARTS.keys())
def test_content_in_several_parts_is_rendered_as_in_transformers(tmp_path, template, learned, form):
    """A template that reads no list, or only its first part, gets joined parts. transformers would lose the others."""
    transformers = pytest.importorskip("transformers")
    path = folder_of(tmp_path, template)
    question = [{"type": "text", "text": "a "}, {"type": "text", "text": " b\n"}]
    answer = [{"type": "text", "text": text} for text in ("x ", " y\n", "z")]
    chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    row = {"messages": chat, "prompt": chat[:1], "completion": chat[1:]}
    tokenizer = open_tokenizer(str(path))
    (document,) = open_encoder(tokenizer, Data(format=form)).encode([row])

    # The reference gets joined parts too, as a text or as one part.
    if template in (NO_REASONING, FIRST_PART):
        for message in chat:
            text = "".join(part["text"] for part in message["content"])
            joined_part = [{"type": "text", "text": text}]
            message["content"] = text if template == NO_REASONING else joined_part
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(path))

    assert document.tokens.tolist() == reference.apply_chat_template(chat)["input_ids"]

    text = tokenizer.decode(document.tokens[document.learned], keep_special=True)
    assert text in (learned + "<|eot|>", learned + "<|im_end|>")


def test_prompt_with_text_that_the_template_drops_is_rejected(tmp_path):
    tokenizer = open_tokenizer(str(folder_of(tmp_path, NO_USER)))
    with pytest.raises(Unusable, match="drops the content of turn 1"):
        open_conversations(tokenizer, Data(format="chat")).prompt([USER])


THINKING = """\
{{ tools | tojson if tools else '' }}{{ bos_token }}\
{% set think = '<think></think>' if enable_thinking is defined and enable_thinking is false else '' %}\
{% for m in messages %}<|h|>{{ m.role }}<|/h|>{{ think if m.role == 'assistant' }}{{ m.content }}<|eot|>{% endfor %}\
{% if add_generation_prompt %}<|h|>assistant<|/h|>{{ think }}{% endif %}"""
KWARGS = {
    "false": {"enable_thinking": False},
    "as JSON text": '{"enable_thinking": false}',
    "null is as if absent": {"enable_thinking": None},
    "no column": None,
    "a special token": {"bos_token": "<|im_start|>"},
    "tools": {"tools": [{"name": "f"}]},
}


@pytest.mark.parametrize("kwargs", KWARGS.values(), ids=KWARGS.keys())
def test_template_variables_of_a_row_work_as_in_transformers(tmp_path, kwargs):
    """The column ``chat_template_kwargs`` contains arguments of ``apply_chat_template``, as in TRL."""
    transformers = pytest.importorskip("transformers")
    path = folder_of(tmp_path, THINKING)
    tokenizer = open_tokenizer(str(path))
    row = {
        "messages": [USER, ANSWER],
        "prompt": [USER],
        "completion": [ANSWER],
        "chosen": [ANSWER],
        "rejected": [ANSWER],
        "chat_template_kwargs": kwargs,
    }
    variables = json.loads(kwargs) if isinstance(kwargs, str) else kwargs or {}
    variables = {name: value for name, value in variables.items() if value is not None}
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(str(path))
    expected = reference.apply_chat_template([USER, ANSWER], **variables)["input_ids"]
    without_variables = reference.apply_chat_template([USER, ANSWER])["input_ids"]
    assert (expected == without_variables) == (not variables)

    # The variables apply to both row formats.
    for form in ("chat", "prompt_completion"):
        (document,) = open_encoder(tokenizer, Data(format=form)).encode([row])
        assert document.tokens.tolist() == expected
        assert tokenizer.decode(document.tokens[document.learned]) == "Blue."

    # Generation and tasks on rows render the same prompt.
    conversations = open_conversations(tokenizer, Data(format="chat"))
    prompts = GenerationPrompts(tokenizer, Data(), conversations)
    prompt = prompts.row(PromptRow("a:1", "", row), "prompt", "tools")
    assert (
        prompt
        == reference.apply_chat_template([USER], add_generation_prompt=True, **variables)[
            "input_ids"
        ]
    )


BAD_KWARGS = {
    "a list": ([1], "column 'chat_template_kwargs' holds a list, not an object"),
    "no JSON": ("x", "column 'chat_template_kwargs' holds a text that is not a JSON object"),
    "reserved": (
        {"chat_template": "x"},
        "column 'chat_template_kwargs' sets 'chat_template', which the trainer sets",
    ),
    "tools": ({"tools": 3}, "column 'tools' holds a number, not a list of tools"),
}


@pytest.mark.parametrize(("kwargs", "reason"), BAD_KWARGS.values(), ids=BAD_KWARGS.keys())
def test_invalid_template_variables_make_a_bad_row(tmp_path, kwargs, reason):
    result = encode(
        folder_of(tmp_path, THINKING), {"messages": [USER, ANSWER], "chat_template_kwargs": kwargs}
    )

    assert isinstance(result, BadRow)
    assert reason in result.reason


@pytest.mark.parametrize("form", ["chat", "prompt_completion"])
def test_keys_that_only_other_trainers_read_are_logged_once(tmp_path, form, caplog):
    encoder = open_encoder(open_tokenizer(str(folder_of(tmp_path, CHATML))), Data(format=form))
    silent = [{**ANSWER, "weight": 1}]
    plain = {
        "messages": [USER, *silent],
        "prompt": [USER],
        "completion": silent,
        "images": [],
        "image": None,
    }
    encoder.encode([plain])

    assert caplog.messages == []

    # Each ignored key is logged once, although two rows and a later call contain the same keys.
    weighed = [{**ANSWER, "weight": 0}]
    row = {**plain, "images": ["a.png"], "messages": [USER, *weighed], "completion": weighed}
    encoder.encode([row, row])
    encoder.encode([row])

    assert caplog.messages == [
        "column 'images' is not used: TRL reads images from it",
        "key of messages 'weight' is not used: OpenAI excludes turns with weight 0 from the loss",
    ]


SEPARATED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("form", ["chat", "prompt_completion"])
def test_newline_after_a_turn_is_learned_with_learn_turn_separator(tmp_path, form):
    chat = [USER, ANSWER, USER, ANSWER]
    row = {"messages": chat, "prompt": chat[:1], "completion": chat[1:]}
    tokenizer = open_tokenizer(str(folder_of(tmp_path, SEPARATED)))
    texts = {}
    for is_learned in (False, True):
        encoder = open_encoder(tokenizer, Data(format=form, learn_turn_separator=is_learned))
        (document,) = encoder.encode([row])
        texts[encoder.fingerprint] = tokenizer.decode(
            document.tokens[document.learned], keep_special=True
        )

    assert list(texts.values()) == ["Blue.<|im_end|>" * 2, "Blue.<|im_end|>\n" * 2]


def test_learn_turn_separator_is_rejected_for_a_template_with_marks(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"learn_turn_separator=true has no effect, because the chat template marks",
    ):
        encode(folder_of(tmp_path, CHATML), {"messages": TURNS}, learn_turn_separator=True)


# In the style of GLM-4-MoE: a turn has no end token, and the next role token follows directly
NO_END = (
    "<s>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
NO_END_MARKED = NO_END.replace(
    "{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"
)
ADVICE = "add one with data.turn_end, such as '</s>'"


@pytest.mark.parametrize("form", ["chat", "prompt_completion"])
# ``turn_end`` is inserted after the last turn only, because the context at inference does not have it either.
@pytest.mark.parametrize(
    ("template", "end", "learned", "is_warned"),
    [
        pytest.param(NO_END, None, "Blue.Blue.", True, id="no end"),
        pytest.param(NO_END, "</s>", "Blue.Blue.</s>", False, id="inserted"),
        pytest.param(
            NO_END, "<|user|>", "Blue.<|user|>Blue.<|user|>", False, id="of the next turn"
        ),
        pytest.param(SEPARATED, None, "Blue.<|im_end|>Blue.<|im_end|>", False, id="ChatML"),
    ],
)
def test_template_without_end_of_turn_is_logged_and_turn_end_inserts_one(
    form, template, end, learned, is_warned, tmp_path, caplog
):
    chat = [USER, ANSWER, USER, ANSWER]
    row = {"messages": chat, "prompt": chat[:1], "completion": chat[1:]}
    tokenizer = open_tokenizer(str(folder_of(tmp_path, template)))
    encoder = open_encoder(tokenizer, Data(format=form, turn_end=end))
    for _ in range(2):
        (document,) = encoder.encode([row])

    assert tokenizer.decode(document.tokens[document.learned], keep_special=True) == learned
    assert [ADVICE in message for message in caplog.messages] == [True] * is_warned

    if template == NO_END:
        decoded = tokenizer.decode(document.tokens, keep_special=True)
        assert decoded.count("</s>") == (end == "</s>")
        without_option = open_encoder(tokenizer, Data(format=form))
        assert (encoder.fingerprint == without_option.fingerprint) == (end is None)

    # Generation stops at the end token of a turn, not only at EOS.
    ends = end_tokens(tokenizer, Data(format=form, turn_end=end), has_conversations=True)
    end_of_turn = "<|im_end|>" if template == SEPARATED else end or "</s>"
    assert {tokenizer.decode([token], keep_special=True) for token in ends} == {"</s>", end_of_turn}


def test_turn_end_extends_the_marks_of_a_template(tmp_path):
    tokenizer = open_tokenizer(str(folder_of(tmp_path, NO_END_MARKED)))
    encoder = open_encoder(tokenizer, Data(format="chat", turn_end="<|user|>"))
    (document,) = encoder.encode([{"messages": [ANSWER]}])
    assert tokenizer.decode(document.tokens[document.learned], keep_special=True) == "Blue.<|user|>"


@pytest.mark.parametrize(
    ("template", "end", "reason"),
    [
        (NO_END, "the cat", "is not a special token of the tokenizer"),
        (NO_END, "</s></s>", "is not a special token of the tokenizer"),
        (
            SEPARATED,
            "</s>",
            r"has no effect, because the chat template already ends a turn with '<\|im_end\|>'",
        ),
    ],
)
def test_turn_end_that_cannot_be_added_is_an_error(template, end, reason, tmp_path):
    with pytest.raises(ConfigError, match=f"data.turn_end=.*{reason}"):
        encode(folder_of(tmp_path, template), {"messages": TURNS}, turn_end=end)
