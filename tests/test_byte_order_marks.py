"""A UTF-8 byte order mark, which some Windows editors write at the start of a file, is ignored in all file formats."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shardtrain
from shardtrain import config
from shardtrain.compat.migrate import document
from shardtrain.config.model_file import read_model_file
from shardtrain.config.task_file import read_task_file
from shardtrain.data import sources
from shardtrain.data.sources import Request, every_row
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.data.tokenizers.tokenizer_config import read_text
from shardtrain.hf.folder_config import config_of
from shardtrain.hf.generation_config import end_ids, read_settings
from shardtrain.hf.source import of_folder
from shardtrain.optim import lr_scheduler
from shardtrain.tools.generate.prompts import read_rows
from shardtrain.tools.plan import hardware

PACKAGE = Path(shardtrain.__file__).parent
LLAMA = (
    '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 260, "hidden_size": 32, '
    '"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}'
)
DEVICE = """
[devices.mine]
memory_gib = 24
memory_bytes_per_second = 1e12
devices_per_node = 4
link = "pcie4"
network = "ethernet-100g"
source = "its box"
[devices.mine.flops]
bfloat16 = 100e12
"""
TOKENIZER = (PACKAGE / "data/tokenizers/python_bpe/tokenizer.json").read_text()


def rows(name: str) -> Callable[[Path], Any]:
    def read(file: Path) -> Any:
        return [row for _, row in every_row(sources.find(name).open_source(Request(str(file))))]

    return read


def last_rate(file: Path) -> float:
    return float(lr_scheduler.find(str(file))(3, 10))


def generation_ends(file: Path) -> list[int]:
    return end_ids(read_settings(of_folder(file.parent)))


def model_of(file: Path) -> dict[str, Any]:
    return dict(config_of(file.parent, "bytes").config.model.overrides)


def some_ids(file: Path) -> list[int]:
    return [int(number) for number in open_tokenizer(str(file)).encode("def main(): pass")]


# each file: its name, text and reader
FILES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "run.toml": ("[training]\nsteps = 5\n", lambda file: config.load(file).config),
    "devices.toml": (DEVICE, lambda file: hardware.find(str(file))),
    "config.json": (LLAMA, model_of),
    "generation_config.json": ('{"eos_token_id": [1, 7]}', generation_ends),
    "tokenizer.json": (TOKENIZER, some_ids),
    "template.jinja": ("{{ messages }}", lambda file: read_text(file, "data.chat_template")),
    "zero.json": ('{"train_batch_size": 8}', lambda file: document.read(file).values),
    "axolotl.yml": ("base_model: x\n", lambda file: document.read(file).values),
    "prompts.jsonl": ('{"text": "a"}\n', lambda file: read_rows(file, "text", "prediction")),
    "rows.jsonl": ('{"text": "a"}\n', rows("jsonl")),
    "rows.txt": ("a b\n", rows("text")),
    "rows.tsv": ("text\tlabel\na\t1\n", rows("tsv")),
    "schedule.py": ("def factor(step, total_steps):\n    return 0.5\n", last_rate),
    "model.py": ((PACKAGE / "models/llama3.py").read_text(), lambda file: read_model_file(str(file)).flavors),
    "task.py": (
        (PACKAGE / "tasks/reward_model.py").read_text(), lambda file: read_task_file(str(file)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_byte_order_mark_changes_nothing(name: str, tmp_path: Path) -> None:
    text, read = FILES[name]
    results = []
    for mark in (b"", codecs.BOM_UTF8):
        file = tmp_path / name
        file.write_bytes(mark + text.encode())
        results.append(read(file))

    assert results[0] == results[1]
    assert results[0]
