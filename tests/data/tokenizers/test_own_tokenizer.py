"""Tokenizers in a Python file of the user: they train, are identified by content, and run only if users name them."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from shardtrain.cli import main
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.utils.errors import ConfigError

OPTION = "model.tokenizer_path"
DEBUG = str(Path(__file__).parents[3] / "configs/debug.toml")
LETTERS = """
LETTERS = "abcdefghijklmnopqrstuvwxyz "

class Tokenizer:
    vocab_size, bos_id, eos_id = len(LETTERS) + 2, len(LETTERS), len(LETTERS) + 1

    def encode(self, text):
        return [LETTERS.find(c) if c in LETTERS else 26 for c in text.lower()]

    def decode(self, ids):
        return "".join(LETTERS[i] for i in ids)

    def spans(self, text):
        return [(i, i + 1) for i in range(len(text))]
"""


def written(folder, text=LETTERS):
    path = folder / "my_tokenizer.py"
    path.write_text(text)
    return str(path)


def test_own_tokenizer_encodes_decodes_and_reopens_in_another_process(tmp_path):
    tokenizer = open_tokenizer(written(tmp_path), OPTION)
    ids = tokenizer.encode("The cat")
    assert ids.dtype.name == "int32"
    assert tokenizer.decode([27, *ids.tolist(), 28]) == "the cat"
    assert (
        tokenizer.decode([27, *ids.tolist(), 28, 28], keep_special=True) == "<bos>the cat<eos><eos>"
    )
    assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (
        29,
        27,
        28,
        None,
    )
    assert tokenizer.encode_spans(["ab"])[0][1].tolist() == [[0, 1], [1, 2]]

    copy = pickle.dumps(tokenizer)
    assert pickle.loads(copy).fingerprint == tokenizer.fingerprint

    written(tmp_path, LETTERS + "# changed")
    with pytest.raises(ConfigError, match="changed while it was in use"):
        pickle.loads(copy)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LETTERS.replace("class Tokenizer", "class Letters"), "has no Tokenizer"),
        (LETTERS.replace("def decode", "def text"), "without decode"),
        (LETTERS.replace("len(LETTERS) + 2", "0"), "vocab_size"),
        (LETTERS.replace("len(LETTERS) + 1", "99"), "eos_id=99, which is not an id"),
    ],
)
def test_file_without_a_valid_tokenizer_is_a_one_line_error_before_ranks_start(
    tmp_path, capsys, text, message
):
    path = written(tmp_path, text)
    assert main(["config", "check", DEBUG, f"--{OPTION}={path}", "--training.device=cpu"]) == 2

    captured = capsys.readouterr()
    lines = (captured.out + captured.err).splitlines()
    (line,) = [line for line in lines if "my_tokenizer.py" in line]
    assert OPTION in line
    assert message in line


def test_ids_outside_the_vocabulary_and_missing_spans_are_reported(tmp_path):
    wrong = open_tokenizer(written(tmp_path, LETTERS.replace("else 26", "else 99")), OPTION)
    with pytest.raises(ConfigError, match="returns ids from 99 to 99"):
        wrong.encode("!")

    plain = open_tokenizer(written(tmp_path, LETTERS.replace("def spans", "def other")), OPTION)
    with pytest.raises(ConfigError, match="without spans"):
        plain.encode_spans(["a"])


def test_options_that_name_artifacts_run_no_code(tmp_path):
    path = written(tmp_path, "raise SystemExit('ran')\n" + LETTERS)
    with pytest.raises(ConfigError, match="model.hf_assets_path"):
        open_tokenizer(path)
    with pytest.raises(ConfigError):
        open_tokenizer(str(tmp_path))
