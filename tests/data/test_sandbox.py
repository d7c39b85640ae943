"""What eats memory or time is refused in one line, by a child with limits, and not by the end of this process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiers import cases
from tiny_tokenizers import bpe_folder

from shardtrain.data import sandbox, sources
from shardtrain.data.chat_template import ChatTemplate
from shardtrain.data.columns import Unusable
from shardtrain.data.tokenizer import open_tokenizer
from shardtrain.hf.config_json import read_json
from shardtrain.utils.errors import CheckpointError, ConfigError, DataError

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


@pytest.mark.parametrize("text", cases(TEMPLATES[::4], nightly=[t for i, t in enumerate(TEMPLATES) if i % 4]))
def test_a_template_that_repeats_what_it_holds_is_refused(text: str) -> None:
    with pytest.raises((Unusable, ConfigError)) as refused:
        ChatTemplate(text, {}).render([{"role": "user", "content": "hello"}])
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 1000


def test_a_long_conversation_is_none_of_that() -> None:
    text = "{% for m in messages %}{{ m['role'] + m['content']|trim }}{% if messages|length %}.{% endif %}{% endfor %}"
    written = ChatTemplate(text, {}).render([{"role": "user", "content": "word " * 3_000_000}] * 2)
    assert len(written) > 2 * 14_000_000


DOUBLING = {"type": "Replace", "pattern": {"String": "h"}, "content": "hh"}
TOKENIZERS = {
    "doubling": ({"normalizer": {"type": "Sequence", "normalizers": [DOUBLING] * 31}}, "1000 times longer"),
    "long": ({"normalizer": {**DOUBLING, "content": "h" * 2**20}}, "1000 times longer"),
    "panic": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}}, "artefact_memory_bytes"),
}


@pytest.mark.parametrize("name", cases(["doubling"], nightly=["long", "panic"]))
def test_a_tokenizer_that_would_end_the_process_is_refused(name: str, tmp_path: Path) -> None:
    change, words = TOKENIZERS[name]
    file = bpe_folder(tmp_path) / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigError, match=words) as refused:
        open_tokenizer(str(tmp_path))
    assert len(str(refused.value).splitlines()) == 1


def test_a_parquet_bomb_is_refused(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "bomb.parquet"
    # one page of 320 MB, which is above the limit that is set here
    pq.write_table(pa.table({"text": ["a" * 40_000_000] * 8}), path, compression="zstd")
    sandbox.set_limits(sandbox.Limits(memory_bytes=2**28))
    try:
        with pytest.raises(DataError, match="needs more than data.artefact_memory_bytes=268435456"):
            sources.find("parquet").open_source(sources.Request(path=str(path)))
    finally:
        sandbox.set_limits(sandbox.Limits())


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_local_experts", "n_routed_experts"])
def test_a_config_of_more_parts_than_any_model_has_is_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {key: 2**31 - 1}}))
    with pytest.raises(CheckpointError, match=f"{key}=2147483647 is above 4096"):
        read_json(tmp_path / "config.json")


def test_what_was_proved_once_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(sandbox, "_ask", lambda request: asked.append(request) or "")
    for _ in range(2):
        sandbox.prove("tokenizer", {}, f"key of {tmp_path}")
    assert len(asked) == 1
