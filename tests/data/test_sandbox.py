"""Artifacts that exhaust memory or time in a child process with limits are rejected with a one-line error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiers import cases
from tiny_tokenizers import bpe_folder

from shardtrain.data import sandbox, sources
from shardtrain.data.chat.chat_template import ChatTemplate
from shardtrain.data.documents.columns import Unusable
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.hub_formats.config_json import read_json
from shardtrain.utils.errors import CheckpointError, ConfigError, DataError


@contextmanager
def _limits(**limits: int) -> Iterator[None]:
    sandbox.set_limits(sandbox.Limits(**limits))
    try:
        yield
    finally:
        sandbox.set_limits(sandbox.Limits())


REPEATED = "([('a' * 1000000)] * 60000)"
TEMPLATES = [
    "{{ " + REPEATED + "|string }}",
    "{{ " + REPEATED + " }}",
    "{{ " + REPEATED + " ~ 'x' }}",
    "{{ '%s' % (" + REPEATED + ",) }}",
    "{{ '{}'.format(" + REPEATED + ") }}",
    "{{ ''.join(" + REPEATED + "|map('default')) }}",
    "{{ " + REPEATED + "|pprint }}",
    "{{ " + REPEATED + "|urlize }}",
    "{{ " + REPEATED + "|sort|length }}",
    "{{ " + REPEATED + "|replace('a', 'b') }}",
    "{{ dict(a=" + REPEATED + ")|xmlattr }}",
    "{{ {}[(('a' * 1000000),) * 60000] }}",
    "{{ raise_exception(" + REPEATED + ") }}",
    "{{ ([['a' * 1000000]] * 60000)|groupby(0)|list }}",
    "{{ ([[1] * 1000] * 60000)|tojson(indent=4) }}",
    "{{ ([[1] * 1000] * 60000)|sum(start=[]) }}",
    "{{ ('\n' * 30000000)|indent(10000) }}",
    "{{ ('\n' * 3000000)|indent('x' * 1000) }}",
    "{{ ('a b ' * 15000000)|wordwrap(3) }}",
    "{{ ('a' * 60000000)|batch(1)|list|length }}",
    "{{ ('a ' * 30000000).split()|length }}",
    "{{ ('a' * 60000000)|title }}",
    "{% set t = 'a' * 100 %}" + "{% set t %}{{ t }}{{ t }}{% endset %}" * 40 + "{{ t }}",
    "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
]
DOUBLED = (
    "{% set n = namespace(v=[1], w=[1], s=(1,), t=(1,)) %}{% for i in range(40) %}"
    "{% set n.v = [n.v, n.v] %}{% set n.w = [n.w, n.w] %}"
    "{% set n.s = (n.s, n.s) %}{% set n.t = (n.t, n.t) %}{% endfor %}"
)
"""Lists and tuples of depth 40, with 2^40 items if each occurrence counts."""
COMPARISONS = [
    "{{ n.v == n.w }}",
    "{{ n.v < n.w }}",
    "{{ n.v in [n.w] }}",
    "{{ 1 if n.v != n.w }}",
    "{{ [n.w].index(n.v) }}",
    "{{ [n.w].count(n.v) }}",
    "{{ n.v is eq(n.w) }}",
    "{{ n.v is in([n.w]) }}",
    "{{ [n.v]|select('eq', n.w)|list|length }}",
    "{{ [n.v]|reject('lt', n.w)|list|length }}",
    "{{ [n.v, n.w]|unique|list|length }}",
    "{{ [n.v, n.w]|min|length }}",
    "{{ [n.v, n.w]|sort|length }}",
    "{{ {n.s: 1}|length }}",
    "{{ dict([(n.s, 1)])|length }}",
    "{{ {}.get(n.s) }}",
    "{{ {1: 2}[n.s] }}",
    "{% for x in [n.v, n.w] %}{{ loop.changed(x) }}{% endfor %}",
    "{% for x in [n.v] if x == n.w %}{% endfor %}",
    "{% if n.v >= n.w %}{% endif %}",
]


@pytest.mark.parametrize(
    "text", cases(TEMPLATES[::4], nightly=[t for i, t in enumerate(TEMPLATES) if i % 4])
)
def test_template_that_multiplies_its_text_is_rejected(text: str) -> None:
    with pytest.raises((Unusable, ConfigError)) as refused:
        ChatTemplate(text, {}).render([{"role": "user", "content": "hello"}])
    assert len(str(refused.value).splitlines()) == 1
    assert len(str(refused.value)) < 1000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("comparison", COMPARISONS)
def test_template_that_compares_exponentially_many_items_is_rejected(comparison: str) -> None:
    with pytest.raises(Unusable) as refused:
        ChatTemplate(DOUBLED + comparison, {}).render([{"role": "user", "content": "hello"}])
    assert len(str(refused.value).splitlines()) == 1


def test_template_compares_messages_as_usual() -> None:
    template = ChatTemplate(
        "{{ messages == messages }} {{ messages[0] in messages }} {{ {'a': 1, ('b', 2): 3}[('b', 2)] }} "
        "{{ messages is eq(messages) }} {{ 2 < 3 > 1 }} {{ missing == 1 }} {{ 'e' in 'hello' }}",
        {},
    )

    assert template.render([{"role": "user", "content": "x"}]) == "True True 3 True True False True"


@pytest.mark.parametrize("number", ["1" * 5000, "0x" + "f" * 500_000])
def test_template_with_a_number_of_too_many_digits_is_rejected(number: str) -> None:
    with pytest.raises(ConfigError, match="a number with too many digits") as refused:
        ChatTemplate("{{ " + number + " }}", {}).render([{"role": "user", "content": "x"}])
    assert len(str(refused.value).splitlines()) == 1


def test_long_conversation_is_accepted() -> None:
    text = "{% for m in messages %}{{ m['role'] + m['content']|trim }}{% if messages|length %}.{% endif %}{% endfor %}"
    written = ChatTemplate(text, {}).render([{"role": "user", "content": "word " * 3_000_000}] * 2)
    assert len(written) > 2 * 14_000_000


# Templates that read the entire conversation in each turn. None is from a published model.
PER_TURN = [
    "{% if m == messages[-1] %}last{% endif %}",
    "{% if messages == [] or messages != none %}{% endif %}",
    "{% if m in messages[:3] or tools == messages %}{% endif %}",
    "{% if m.get('content') == messages[0].get('content') and m is ne(messages[0]) %}{% endif %}",
    "{% if loop.index0 and m == messages[loop.index0 - 1] %}again{% endif %}",
    "{% if messages is eq(none) or messages == messages %}{% endif %}",
]


@pytest.mark.parametrize("body", cases(PER_TURN[:2], nightly=PER_TURN[2:]))
def test_template_may_compare_messages_in_each_of_10_000_turns(body: str) -> None:
    """Templates that compare each message with its neighbors or with all others stay below the limits."""
    messages = [
        {"role": ("user", "assistant")[number % 2], "content": f"{number} " + "word " * 40}
        for number in range(10_000)
    ]
    text = "{% for m in messages %}" + body + "{{ m.content }}{% endfor %}"

    assert len(ChatTemplate(text, {}).render(messages)) > 10_000 * 200


def test_template_may_search_messages_in_each_of_500_turns() -> None:
    """Published templates find the number of a message with ``index``, which compares it with all before it."""
    messages = [{"role": ("user", "assistant")[n % 2], "content": f"{n}"} for n in range(500)]
    text = "{% for m in messages %}{{ messages.index(m) }} {% endfor %}"
    assert ChatTemplate(text, {}).render(messages).split() == [str(n) for n in range(500)]


DOUBLING = {"type": "Replace", "pattern": {"String": "h"}, "content": "hh"}
PART = {"SpecialToken": {"id": "h", "type_id": 0}}
TEMPLATE = {
    "type": "TemplateProcessing",
    "pair": [],
    "special_tokens": {"h": {"id": "h", "ids": [1], "tokens": ["h"]}},
}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
MANY_IDS = {"h": {"id": "h", "ids": [1] * 1001, "tokens": ["h"] * 1001}}
TOKENIZERS = {
    "parts": (
        {"post_processor": {**TEMPLATE, "single": [PART] * 3000 + [TEXT]}},
        "adds more than 1000 tokens",
    ),
    "ids": (
        {"post_processor": {**TEMPLATE, "single": [PART, TEXT], "special_tokens": MANY_IDS}},
        "adds more than 1000 tokens",
    ),
    "doubling": (
        {"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 31}},
        "1000 times longer",
    ),
    "long": ({"normalizer": {**DOUBLING, "content": "h" * 2**20}}, "1000 times longer"),
    "panic": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        "artefact_memory_bytes",
    ),
}


@pytest.mark.parametrize("name", cases(["doubling", "parts"], nightly=["long", "panic", "ids"]))
def test_tokenizer_that_would_exhaust_the_process_is_rejected(name: str, tmp_path: Path) -> None:
    change, message = TOKENIZERS[name]
    file = bpe_folder(tmp_path) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))

    with pytest.raises(ConfigError, match=message) as refused:
        open_tokenizer(str(tmp_path))
    assert len(str(refused.value).splitlines()) == 1


def test_parquet_bomb_is_rejected(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "bomb.parquet"
    # one page of 320 MB, above the limit set here
    pq.write_table(pa.table({"text": ["a" * 40_000_000] * 8}), path, compression="zstd")
    with (
        _limits(memory_bytes=2**28),
        pytest.raises(DataError, match="data.artefact_memory_bytes=268435456"),
    ):
        source = sources.find("parquet").open_source(sources.Request(path=str(path)))
        next(sources.every_row(source))


def test_parquet_file_with_many_repeated_values_is_tried_first(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    # 60 million nulls take a few bytes in the file and gigabytes as Python objects.
    nothing = pa.ListArray.from_arrays(
        pa.array([0, 60_000_000], pa.int32()), pa.nulls(60_000_000, pa.int8())
    )
    path = tmp_path / "bomb.parquet"
    pq.write_table(pa.table({"text": ["hello"], "more": nothing}), path, compression="none")

    assert path.stat().st_size < 1000

    with (
        _limits(memory_bytes=2**28),
        pytest.raises(DataError, match="needs more than data.artefact_memory_bytes"),
    ):
        sources.find("parquet").open_source(sources.Request(path=str(path)))


def _arrow(path: Path, column: Any, **options: Any) -> str:
    pa = pytest.importorskip("pyarrow")
    ipc = pytest.importorskip("pyarrow.ipc")
    pytest.importorskip("datasets")
    batch = pa.record_batch({"text": column})
    settings = ipc.IpcWriteOptions(**options)
    with (
        pa.OSFile(str(path), "wb") as sink,
        ipc.new_stream(sink, batch.schema, options=settings) as stream,
    ):
        stream.write_batch(batch)
    return str(path)


def _arrow_bomb(name: str, folder: Path) -> str:
    """Write a file of a kilobyte that requires 320 MB when opened, or one with an offset outside its data."""
    pa = pytest.importorskip("pyarrow")
    text = pa.array(["a" * 40_000_000])
    if name == "compressed":
        return _arrow(folder / "a.arrow", pa.array(["a" * 40_000_000] * 8), compression="zstd")
    if name == "dictionary":
        eight = pa.DictionaryArray.from_arrays(pa.array([0] * 8, pa.int8()), text)
        return _arrow(folder / "a.arrow", eight, compression="zstd")
    # the uncompressed length, stored before the compressed bytes, determines the allocation
    if name == "length":
        file = Path(_arrow(folder / "a.arrow", text, compression="zstd"))
        content = file.read_bytes()
        length = (40_000_000).to_bytes(8, "little")
        assert content.count(length) == 1 or name
        file.write_bytes(content.replace(length, (2**34).to_bytes(8, "little")))
        return str(file)
    offsets = b"".join(n.to_bytes(4, "little") for n in (0, 2**20, 7))
    outside = pa.StringArray.from_buffers(2, pa.py_buffer(offsets), pa.py_buffer(b"1234567"))
    return _arrow(folder / "a.arrow", outside)


ARROW_BOMBS = {
    "compressed": "needs more than data.artefact_memory_bytes=268435456",
    "dictionary": "needs more than data.artefact_memory_bytes=268435456",
    "length": "needs more than data.artefact_memory_bytes=268435456",
    "offsets": "offset for slot 1 out of bounds",
}


@pytest.mark.parametrize("name", cases(["compressed", "offsets"], nightly=["dictionary", "length"]))
def test_arrow_bomb_is_rejected(name: str, tmp_path: Path) -> None:
    path = _arrow_bomb(name, tmp_path)
    with _limits(memory_bytes=2**28), pytest.raises(DataError, match=ARROW_BOMBS[name]) as refused:
        sources.find("huggingface").open_source(sources.Request(path=path))
    assert len(str(refused.value).splitlines()) == 1


def test_saved_dataset_is_tried_like_files(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["hello", "there"]}).save_to_disk(str(tmp_path / "saved"))
    file = next((tmp_path / "saved").glob("*.arrow"))
    _arrow_bomb("compressed", file.parent)
    (file.parent / "a.arrow").replace(file)
    with (
        _limits(memory_bytes=2**28),
        pytest.raises(DataError, match="data.artefact_memory_bytes=268435456"),
    ):
        sources.find("huggingface").open_source(sources.Request(path=str(tmp_path / "saved")))


def test_arrow_file_larger_than_the_limit_is_memory_mapped(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    path = _arrow(tmp_path / "a.arrow", pa.array(["a" * 5_000_000] * 60))
    with _limits(memory_bytes=2**28):
        source = sources.find("huggingface").open_source(sources.Request(path=path))

    assert source.num_rows == 60
    assert len(source.row(59)["text"]) == 5_000_000


def test_row_counts_its_memory_in_python(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from shardtrain.data.sources._batches import rows_of_batch

    # Small in Arrow, huge as Python objects: a repeated text, nulls, and overlapping views.
    zeros = pa.array([0] * 2000, pa.int8())
    many_texts = pa.DictionaryArray.from_arrays(zeros, pa.array(["a" * 8_000_000]))
    all_texts = pa.array([0, 2000], pa.int32())
    all_nulls = pa.array([0, 10**9], pa.int32())
    columns = [
        pa.ListArray.from_arrays(all_texts, many_texts),
        pa.ListArray.from_arrays(all_nulls, pa.nulls(10**9)),
        pa.ListViewArray.from_arrays(pa.array([0] * 9), pa.array([10**7] * 9), pa.nulls(10**7)),
    ]
    for column in columns:
        for row in rows_of_batch(pa.table({"text": column}), 2**24):
            assert isinstance(row, sources.BadRow)
            assert "data.max_row_bytes" in str(row)

    # Small rows of the same types are read.
    table = pa.table(
        {
            "label": pa.array(["good", None, "bad"] * 50).dictionary_encode(),
            "turns": pa.array([[{"role": "user", "content": "x" * 10}] * 3] * 150),
            "of": pa.array([[("k", 1)]] * 150, pa.map_("string", "int8")),
        }
    )
    part = table.slice(1, 100)
    assert list(rows_of_batch(part, 1000)) == part.to_pylist()


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_local_experts", "n_routed_experts"])
def test_config_with_too_many_layers_or_heads_is_rejected(key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {key: 2**31 - 1}}))
    with pytest.raises(CheckpointError, match=f"{key}=2147483647 is above"):
        read_json(tmp_path / "config.json")


def test_accepted_artifact_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[object] = []
    monkeypatch.setattr(sandbox, "_ask", lambda request: trials.append(request) or "")
    for _ in range(2):
        sandbox.open_in_child("tokenizer", {}, f"key of {tmp_path}")

    assert len(trials) == 1
