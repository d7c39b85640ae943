"""An exported folder stops generation where the trained model stops. Nothing else in its files changes."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import build, save
from lora_runs import train
from tiers import cases
from tiny import tiny_config
from tiny_tokenizers import bpe_folder

from shardtrain.cli import main
from shardtrain.config.schema import Config
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.hf.generation_config import GENERATION, read_settings, trained_tokens, with_tokens
from shardtrain.hf.hub_model import recognise
from shardtrain.hf.source import of_folder

transformers = pytest.importorskip("transformers")

SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS, EOS, START, TURN_END = range(4)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ROWS = {
    "chat": {
        "messages": [
            {"role": "user", "content": "Hello!"},
            {"role": "assistant", "content": "the cat sat"},
        ]
    },
    "prompt_completion": {"prompt": "Hello!", "completion": " the cat sat"},
    "text": {"text": "Hello! the cat sat"},
}
PROMPT = "Hello!"
NEW = 24


def base_tokenizer(folder: Path) -> Path:
    return bpe_folder(folder, SPECIAL, eos_token="</s>", bos_token="<s>", chat_template=CHATML)


def base(folder: Path, **changed: Any) -> Path:
    """Write a folder with inconsistent tokens: eos 2 and bos 1 in config.json, 1 and 0 in its tokenizer."""
    base_tokenizer(folder)
    save(
        build(
            "llama3", vocab_size=400, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
        ),
        folder,
    )
    (folder / GENERATION).unlink()
    if changed:
        (folder / GENERATION).write_text(json.dumps(changed))
    return folder


def run_of(
    folder: Path, output: Path, form: str, from_scratch: bool = False, lora: bool = False
) -> Config:
    """Return a run that trains until the model repeats its only row."""
    rows = output.with_suffix(".jsonl")
    rows.write_text(json.dumps(ROWS[form]) + "\n")
    recognised = recognise(folder)
    tokenizer = base_tokenizer(output.with_name("tokenizer")) if from_scratch else folder
    config = tiny_config(
        job={"dump_folder": str(output)},
        data={"format": form},
        training={
            "steps": 40, "seq_len": 32, "local_batch_size": 2, "global_batch_size": 2, "dataset": "jsonl",
            "dataset_path": str(rows), "on_data_end": "repeat",
        },
        optimizer={"lr": 2e-2, "eps": 1e-8, "weight_decay": 0.0},
        lora={"enable": lora, "rank": 8, "alpha": 16.0},
        checkpoint={"enable": True, "last_save_in_hf": not lora}
        | ({} if from_scratch else {"initial_load_path": str(folder), "initial_load_in_hf": True}),
    )  # fmt: skip
    model = dataclasses.replace(
        config.model,
        name=recognised.name,
        flavor=recognised.flavor,
        overrides=dict(recognised.overrides),
        hf_assets_path=str(tokenizer),
    )
    config = dataclasses.replace(config, model=model)
    assert train(1, config)[0].error is None
    return config


def texts(
    folder: Path, chat: bool, capfd: pytest.CaptureFixture[str], run: Path | None = None
) -> tuple[str, str]:
    """Return the texts of ``shardtrain generate`` from a run or the folder, and of transformers from the folder."""
    capfd.readouterr()
    arguments = [
        "generate",
        "--from",
        str(run or folder),
        "--prompt",
        PROMPT,
        "--max_new_tokens",
        str(NEW),
    ]
    assert main([*arguments, *(["--chat"] if chat else [])]) == 0
    ours = capfd.readouterr().out.removesuffix("\n")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if chat:
        messages = [{"role": "user", "content": PROMPT}]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        prompt = tokenizer(PROMPT, return_tensors="pt")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    new = model.generate(**prompt, max_new_tokens=NEW, do_sample=False)[
        0, prompt.input_ids.size(1) :
    ]
    assert len(new) < NEW, "generation did not stop"
    return ours, tokenizer.decode(new, skip_special_tokens=True)


def fields_of(folder: Path, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((folder / name).read_text())
    return fields


@pytest.mark.parametrize(
    ("form", "from_scratch", "eos"),
    cases(
        [("chat", False, [EOS, TURN_END, 2]), ("text", True, EOS)],
        nightly=[
            ("chat", True, [EOS, TURN_END]),
            ("text", False, [EOS, 2]),
            ("prompt_completion", True, [EOS, TURN_END]),  # rows may be conversations
            ("prompt_completion", False, [EOS, TURN_END, 2]),
        ],
    ),
)
def test_the_export_of_a_run_stops_where_the_run_stops(
    form: str, from_scratch: bool, eos: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    back = tmp_path / "back"
    config = run_of(base(tmp_path / "base"), run, form, from_scratch)
    capfd.readouterr()

    assert main(["export", str(run), "--to", str(back), "--check", "weights"]) == 0

    logged = capfd.readouterr().out
    assert f"config.json: eos_token_id {None if from_scratch else 2} -> {EOS}" in logged
    assert f"generation_config.json: eos_token_id {None if from_scratch else 2} -> {eos}" in logged
    for folder in (back, Path(config.job.dump_folder) / "checkpoint/step-40-hf"):
        generation = fields_of(folder, GENERATION)
        assert generation["bos_token_id"] == BOS
        assert generation["eos_token_id"] == eos
        fields = fields_of(folder, "config.json")
        assert fields["bos_token_id"] == BOS
        assert fields["eos_token_id"] == EOS

    # With --keep_generation_config, the folder keeps the token ids of the base model, if there is one.
    unaligned = tmp_path / "unaligned"
    arguments = ["--to", str(unaligned), "--check", "weights", "--keep_generation_config"]
    assert main(["export", str(run), *arguments]) == 0

    base_ids = {"bos_token_id": 1, "eos_token_id": 2}
    if from_scratch:
        base_ids = {"bos_token_id": None, "eos_token_id": None}
    assert fields_of(unaligned, "config.json") == {**fields_of(back, "config.json"), **base_ids}
    assert not (unaligned / GENERATION).exists()

    # The run, transformers and the export write the same text.
    is_chat = form == "chat"
    of_run, of_transformers = texts(back, is_chat, capfd, run)
    of_export, _ = texts(back, is_chat, capfd)
    expected = "the cat sat" if is_chat else " the cat sat"
    assert of_run == expected
    assert of_transformers == expected
    assert of_export == expected


def test_merged_adapters_stop_where_the_run_stops_unless_disabled(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {"temperature": 0.6, "eos_token_id": [2, 5], "my_own": None}
    folder = base(tmp_path / "base", **settings)
    run_of(folder, tmp_path / "run", "chat", lora=True)
    before = fields_of(folder, "config.json")
    for name, arguments, changed, expected in (
        (
            "aligned",
            [],
            {"bos_token_id": BOS, "eos_token_id": EOS},
            {"eos_token_id": [EOS, TURN_END, 2, 5]},
        ),
        ("unaligned", ["--keep_generation_config"], {}, {}),
    ):
        merged = str(tmp_path / f"merged-{name}")
        back = tmp_path / name
        assert main(["merge", str(tmp_path / "run"), "--to", merged, *arguments]) == 0
        assert main(["export", merged, "--to", str(back), "--check", "weights"]) == 0
        bos = {"bos_token_id": BOS} if changed else {}
        assert fields_of(back, GENERATION) == {**settings, **expected, **bos}
        assert fields_of(back, "config.json") == {**before, **changed}


def ids(value: Any) -> set[int | None]:
    return set(value) if isinstance(value, list) else {value}


IN_CONFIG = (None, EOS, 2, [2, 5], [2, EOS])
IN_GENERATION = ("no file", None, EOS, 5, [2, 5], [5, EOS])


@pytest.mark.parametrize(
    ("in_config", "in_generation"),
    cases(
        [(2, "no file"), ([2, 5], [2, 5]), (EOS, 5), (2, None)],
        nightly=itertools.product(IN_CONFIG, IN_GENERATION),
    ),
)
def test_tokens_are_aligned_like_in_transformers_trainer(
    in_config: Any, in_generation: Any, tmp_path: Path
) -> None:
    from transformers.trainer_utils import align_special_tokens

    folder = base(tmp_path / "hf")
    fields = fields_of(folder, "config.json") | {"eos_token_id": in_config}
    (folder / "config.json").write_text(json.dumps(fields))
    if in_generation != "no file":
        (folder / GENERATION).write_text(
            json.dumps({"eos_token_id": in_generation, "temperature": 0.6})
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    align_special_tokens(model, transformers.AutoTokenizer.from_pretrained(folder))

    aligned, changes = with_tokens(
        of_folder(folder), {"bos_token_id": [BOS], "eos_token_id": [EOS], "pad_token_id": []}
    )
    # Compare sets of ids: transformers also moves a listed end token to the front.
    settings_after = read_settings(aligned)

    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        for ours, theirs in (
            (aligned.config, model.config),
            (settings_after, model.generation_config),
        ):
            assert ids(ours.get(key)) == ids(getattr(theirs, key)), key
    assert settings_after.get("temperature") == (None if in_generation == "no file" else 0.6)

    # Unchanged files keep their bytes.
    again, no_changes = with_tokens(
        aligned, {"bos_token_id": [BOS], "eos_token_id": [EOS], "pad_token_id": []}
    )

    assert changes
    assert again == aligned
    assert not no_changes


MOVED_SHARDS = {"dataset": "tokens", "dataset_path": "/nowhere"}


@pytest.mark.parametrize(
    ("changed", "ends"),
    [
        pytest.param({}, [EOS], id="text"),
        pytest.param({"data": {"format": "chat"}}, [EOS, TURN_END], id="chat"),
        pytest.param({"task": {"name": "preference"}}, [EOS, TURN_END], id="pairs"),
        pytest.param({"data": {"add_eos": False, "separator": "<|im_start|>"}}, [EOS, START], id="separator"),
        pytest.param({"data": {"separator": "\n"}}, [EOS], id="after eos"),
        pytest.param({"training": MOVED_SHARDS}, [EOS, TURN_END], id="moved shards"),
    ],
)  # fmt: skip
def test_end_tokens_are_those_of_the_rows(
    changed: dict[str, Any], ends: list[int], tmp_path: Path
) -> None:
    tokenizer = open_tokenizer(str(base_tokenizer(tmp_path / "tokenizer")))
    expected = {"bos_token_id": [BOS], "eos_token_id": ends, "pad_token_id": []}
    assert trained_tokens(tokenizer, tiny_config(**changed)) == expected


def test_prepared_conversations_are_recognized_by_their_shards(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    shards = tmp_path / "shards"
    rows.write_text(json.dumps(ROWS["chat"]) + "\n")
    folder = base_tokenizer(tmp_path / "tokenizer")
    arguments = [
        "--model.hf_assets_path",
        str(folder),
        "--training.dataset",
        "jsonl",
        "--training.dataset_path",
        str(rows),
    ]

    assert (
        main(["data", "prepare", "--output", str(shards), "--data.format", "chat", *arguments]) == 0
    )

    # The configuration names shards of tokens, and only their index has the format of the rows.
    config = tiny_config(training={"dataset": "tokens", "dataset_path": str(shards)})
    assert trained_tokens(open_tokenizer(str(folder)), config)["eos_token_id"] == [EOS, TURN_END]
