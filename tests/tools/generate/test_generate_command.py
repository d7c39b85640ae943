"""``shardtrain generate``: text from a run folder on any number of ranks, or one line per error."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import patience
import pytest
import torch
from ranks import run_ranks
from tiny import tiny_config
from tiny_tokenizers import bpe_folder

from shardtrain import cli
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config import Loaded
from shardtrain.distributed.process_group import World
from shardtrain.ops import chosen_kernels
from shardtrain.ops.cpu import packed_linear
from shardtrain.tools.generate import generate_request
from shardtrain.tools.generate.answer import Answers
from shardtrain.tools.generate.engine import Generator
from shardtrain.tools.generate.prompts import read_rows
from shardtrain.tools.generate.trained_model import open_model
from shardtrain.train import resume, trainer
from shardtrain.train.run_folder import write_resolved_config
from shardtrain.utils.errors import CheckpointError, ConfigError, DataError

SENTENCES = [
    "mesh and shard, in step.",
    "the rank that gathers last",
    "a loss of seven; a norm",
    "tokens flow: é 東京",
]
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_one(rank, config):
    trainer.train(Loaded(config), World(rank, 1, 0, torch.device("cpu")))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder of a run that has memorized four sentences."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": s}) + "\n" for s in SENTENCES))
    config = tiny_config(
        job={"dump_folder": str(folder / "run")},
        model={"overrides": {"num_layers": 2}},
        training={
            "dataset": "jsonl",
            "dataset_path": str(folder / "rows.jsonl"),
            "local_batch_size": 8,
            "global_batch_size": 8,
            "seq_len": 40,
            "steps": 60,
            "on_data_end": "repeat",
        },
        data={"packing": "padded"},
        optimizer={"lr": 5e-3, "eps": 1e-8},
        checkpoint={"enable": True, "interval": 40},
    )
    run_ranks(1, train_one, config)
    return folder / "run"


def answer(capfd, *arguments):
    code = cli.main(["generate", *arguments])
    out, err = capfd.readouterr()
    return code, out, err


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (
        "OMP_NUM_THREADS",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
        "TORCH_CPP_LOG_LEVEL",
    ):
        monkeypatch.setenv(
            name, os.environ.get(name, {"OMP_NUM_THREADS": "1"}.get(name, "")) or "lo"
        )
    monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "ERROR")
    # the command sets this global, so let monkeypatch restore it
    monkeypatch.setattr(chosen_kernels, "_chosen", chosen_kernels.PYTORCH)


def test_memorized_text_is_generated_and_ends(trained, capfd):
    for sentence in SENTENCES:
        code, out, err = answer(
            capfd, "--from", str(trained), "--prompt", sentence[:4], "--max_new_tokens", "36"
        )
        assert (code, out) == (0, sentence[4:] + "\n"), err
        assert "step-60, float32 on cpu" in err


def test_a_stop_text_ends_the_output(trained, capfd):
    arguments = [
        "--from",
        str(trained / "checkpoint" / "step-60"),
        "--prompt",
        "mesh",
        "--stop",
        " step",
    ]

    assert answer(capfd, *arguments)[:2] == (0, " and shard, in\n")


def test_rows_keep_every_byte_of_their_fields(trained, tmp_path, capfd):
    lines = [
        '{"id": 1.10, "prompt": "mesh ", "big": 123456789012345678901234567890}',
        "",
        '{"prompt":"the r" , "é": {"x": [null, 1e400]}, "\\u65e5": "\\ud800"}  ',
        '{"prompt": "toke"}',
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    out = tmp_path / "out.jsonl"
    arguments = [
        "--from",
        str(trained / "checkpoint"),
        "--input",
        str(tmp_path / "in.jsonl"),
        "--output",
        str(out),
    ]
    arguments += ["--max_new_tokens", "36", "--prediction_field", "answer", "--batch_size", "2"]
    code, _, err = answer(capfd, *arguments)
    assert code == 0, err

    # Each row is written as it was, with one more field before its closing brace.
    written = out.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line]
    answers = ["and shard, in step.", "ank that gathers last", "ns flow: é 東京"]
    for written_row, row, text in zip(written, rows, answers, strict=True):
        fields = row.rstrip().removesuffix("}").rstrip()
        assert written_row == f'{fields}, "answer": "{text}"}}'
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_weights_are_packed_for_the_requested_passes_and_rows(
    trained, tmp_path, capfd, monkeypatch
):
    calls = []
    monkeypatch.setattr(
        packed_linear, "use_where_it_pays", lambda model, passes, rows: calls.append((passes, rows))
    )
    answer(capfd, "--from", str(trained), "--prompt", "mesh", "--max_new_tokens", "20")
    (tmp_path / "in.jsonl").write_text('{"prompt": "mesh "}\n' * 3)
    arguments = [
        "--from",
        str(trained),
        "--input",
        str(tmp_path / "in.jsonl"),
        "--output",
        str(tmp_path / "out.jsonl"),
    ]

    assert answer(capfd, *arguments, "--max_new_tokens", "20", "--batch_size", "2")[0] == 0
    assert calls == [(20, 1), (40, 2)]


@pytest.mark.nightly(
    "the tokens",
    by="tests/tools/generate/test_generate_command.py::test_tensor_parallel_ranks_generate_the_tokens_of_one_rank",
)
def test_two_processes_write_the_same_file_as_one(trained, tmp_path, capfd):
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"q": {"text": s[:n]}}) + "\n" for n, s in enumerate(SENTENCES))
    )
    arguments = [
        "--from",
        str(trained),
        "--input",
        str(tmp_path / "in.jsonl"),
        "--field",
        "q.text",
        "--temperature",
        "1.5",
    ]
    arguments += ["--top_k", "20", "--seed", "7", "--max_new_tokens", "12"]
    for name, more in {"one": ["--batch_size", "3"], "two": ["--nproc", "2"]}.items():
        code, _, err = answer(capfd, *arguments, *more, "--output", str(tmp_path / name))
        assert code == 0, err

    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    assert not list(trained.glob("logs/rank-1*"))  # generation writes no logs to the run folder


# --- every family, split over ranks ---


def save_one(rank, config):
    """Save a checkpoint of untrained weights with influential layers."""
    here = World(rank, 1, 0, torch.device("cpu"))
    run = trainer.build(config, here)
    with torch.no_grad():
        for name, parameter in run.runner.parameters().items():
            if name.startswith("layers.") and parameter.ndim > 1:
                parameter.mul_(6)
    resume.save(run, Checkpoints(config), last=False)
    write_resolved_config(Loaded(config), Path(config.job.dump_folder), 1)


def generate_split(rank, folder, prompts):
    here = World(rank, torch.distributed.get_world_size(), rank, torch.device("cpu"))
    opened = open_model(folder, world=here)
    local_weights = [
        p.to_local() if hasattr(p, "to_local") else p for p in opened.model.parameters()
    ]
    num_local_weights = sum(weight.numel() for weight in local_weights)
    generator = Generator(
        opened.model, opened.layout, opened.tokenizer.vocab_size, width=opened.width
    )
    return generator.generate(prompts, 6), num_local_weights


MOE = {"moe_ffn_dim": 64, "top_k": 2}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("qwen3", {"tied_embeddings": True}),
        ("mixtral", {**MOE, "num_experts": 4}),
        # Two ranks cannot divide three experts, so each has all of them.
        ("mixtral", {**MOE, "num_experts": 3}),
        ("deepseek_v3", {**MOE, "num_experts": 4, "kv_lora_rank": 32, "num_dense_layers": 1}),
    ],
    ids=["qwen3", "mixtral", "mixtral-3-experts", "deepseek_v3"],
)
def test_tensor_parallel_ranks_generate_the_tokens_of_one_rank(tmp_path, name, overrides):
    sizes = {"vocab_size": 512, "dim": 64, "num_layers": 2, "num_heads": 4, **overrides}
    if name != "deepseek_v3":
        sizes |= {"num_kv_heads": 2, "head_dim": 16}
    config = tiny_config(job={"dump_folder": str(tmp_path)}, checkpoint={"enable": True})
    flavor = "debugmodel"
    model = dataclasses.replace(config.model, name=name, flavor=flavor, overrides=sizes)
    config = dataclasses.replace(config, model=model)
    run_ranks(1, save_one, config)
    prompts = [[256, 5, 9], [256], [256, 80, 81, 82, 83, 84]]
    opened = open_model(tmp_path)
    generator = Generator(opened.model, opened.layout, opened.tokenizer.vocab_size)
    expected = generator.generate(prompts, 6)
    (first, num_local_weights), (second, _) = run_ranks(2, generate_split, tmp_path, prompts)

    assert first == second == expected
    assert len({tuple(row) for row in expected}) == 3

    # Each rank has a shard of the layers, but the full embedding.
    num_weights = sum(p.numel() for p in opened.model.parameters())
    assert num_local_weights < 0.9 * num_weights


# --- conversations ---


def test_a_conversation_is_rendered_by_the_template_and_ends_with_its_turn(
    trained, tmp_path, capfd
):
    pytest.importorskip("tokenizers"), pytest.importorskip("jinja2")
    special = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
    folder = bpe_folder(tmp_path / "tokenizer", special, chat_template=CHAT, eos_token="</s>")
    config = (trained / "config.resolved.toml").read_text()
    config = config.replace('hf_assets_path = "bytes"', f'hf_assets_path = "{folder}"')
    (tmp_path / "run.toml").write_text(config)
    arguments = ["--from", str(trained), "--config", str(tmp_path / "run.toml")]
    arguments += ["--max_new_tokens", "3", "--prompt", "Hello", "--chat", "--stop", "<|im_start|>"]
    options = generate_request.read(arguments)
    opened = open_model(options.source, options.config)
    answers = Answers(options, opened)
    tokenizer = opened.tokenizer
    ids = answers._encoder.value("Hello", "prompt")

    assert (
        tokenizer.decode(ids, keep_special=True)
        == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )

    # Generation stops at the end of a turn, at EOS, and at the token of --stop.
    stop_tokens = {tokenizer.decode([i], keep_special=True) for i in answers._stop_ids}
    assert stop_tokens == {"</s>", "<|im_end|>", "<|im_start|>"}

    # A row of messages is rendered like --chat --prompt. Its last turn must be the user's.
    rows = tmp_path / "in.jsonl"
    rows.write_text(
        '{"m": [{"role": "user", "content": "Hello"}]}\n{"m": [{"role": "assistant", "content": "x"}]}\n'
    )
    valid_row, invalid_row = read_rows(rows, "m", "prediction")

    assert answers._encoder.row(valid_row, "m", "tools") == ids
    with pytest.raises(DataError, match=r"in\.jsonl:2: .*nothing to generate"):
        answers._encoder.row(invalid_row, "m", "tools")

    # A run without a template cannot chat.
    code, _, err = answer(capfd, "--from", str(trained), "--chat", "--prompt", "Hello")
    assert code == 2
    assert "data.chat_template is not set" in err


# --- invalid arguments and inputs ---


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--from"),
        (["--from", "x"], "--prompt or --input must be set"),
        (["--from", "x", "--prompt", "a", "--input", "b"], "not both"),
        (["--from", "x", "--input", "b"], "--output out.jsonl"),
        (["--from", "x", "--prompt", "a", "--output", "b"], "has no effect with --prompt"),
        (["--from", "x", "--prompt", "a", "--top_k", "5"], "has no effect at --temperature 0"),
        (["--from", "x", "--prompt", "a", "--seed", "5"], "has no effect at --temperature 0"),
        (
            ["--from", "x", "--prompt", "a", "--top_p", "0", "--temperature", "1"],
            "--top_p=0.0 must be above 0",
        ),
        (["--from", "x", "--prompt", "a", "--temperature", "nan"], "--temperature=nan"),
        (["--from", "x", "--prompt", "a", "--temperature", "1e6"], "--temperature=1000000.0"),
        (
            ["--from", "x", "--prompt", "a", "--max_new_tokens", "0"],
            "--max_new_tokens=0 must be at least 1",
        ),
        (["--from", "x", "--prompt", "a", "--nproc", "0"], "--nproc=0"),
        (["--from", "x", "--prompt", "a", "--stop", ""], "--stop"),
        (["--from", "x", "--prompt", "a", "--tempurature", "1"], "--tempurature"),
        (["--from", "nowhere", "--prompt", "a"], '--from="nowhere" does not exist'),
    ],
)
def test_a_wrong_request_is_one_line(capfd, arguments, message):
    code, out, err = answer(capfd, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{broken", "is not JSON"),
        (b"[1, 2]", "is not a JSON object"),
        (b'"text"', "is not a JSON object"),
        (b'{"text": "x"}', "has no column 'prompt'; its columns are text"),
        (b'{"prompt": 3}', "holds a number, not a text"),
        (b'{"prompt": "\\ud800"}', "lone surrogate"),
        (b'{"prompt": "x", "prediction": 1}', "already has the field 'prediction'"),
        (b'{"prompt": "\xff"}', "is not UTF-8"),
        (b'{"prompt": [{"role": "user", "content": "x"}]}', "add --chat"),
    ],
)
def test_a_bad_row_is_named_without_writing_output(trained, tmp_path, capfd, line, message):
    (tmp_path / "in.jsonl").write_bytes(b'{"prompt": "fine"}\n\n' + line + b"\n")
    arguments = [
        "--from",
        str(trained),
        "--input",
        str(tmp_path / "in.jsonl"),
        "--output",
        str(tmp_path / "out.jsonl"),
    ]
    code, _, err = answer(capfd, *arguments)

    assert code == 3
    assert message in err
    assert "in.jsonl:3: " in err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_files_that_cannot_be_read_or_written_are_named_before_any_work(tmp_path, capfd):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "empty").write_text("\n")
    arguments = ["--from", str(tmp_path), "--output"]
    for output, source, message in (
        ("out", "missing", "cannot be read (No such file"),
        ("out", "empty", "has no rows"),
        ("in.jsonl", "in.jsonl", "exists"),
        ("no/where", "in.jsonl", "is in a folder that does not exist"),
    ):
        code, _, err = answer(
            capfd, *arguments, str(tmp_path / output), "--input", str(tmp_path / source)
        )
        assert code in (2, 3)
        assert message in err


def test_a_damaged_checkpoint_is_refused_by_name_and_skipped_in_a_folder(trained, tmp_path, capfd):
    run = shutil.copytree(trained, tmp_path / "run")
    (stored,) = (run / "checkpoint" / "step-60").glob("*.bin")
    data = bytearray(stored.read_bytes())
    data[1000] ^= 1
    stored.write_bytes(data)

    with pytest.raises(CheckpointError, match=r"step-60.*damaged"):
        open_model(run / "checkpoint" / "step-60")
    assert "step-40" in open_model(run).name

    shutil.rmtree(run / "checkpoint" / "step-40")
    code, _, err = answer(capfd, "--from", str(run), "--prompt", "x")
    assert code == 5
    assert "no checkpoint in" in err
    assert "damaged" in err

    shutil.rmtree(run / "checkpoint")
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        open_model(run)


def test_a_checkpoint_of_another_model_is_refused(trained, tmp_path):
    text = (trained / "config.resolved.toml").read_text()
    (tmp_path / "other.toml").write_text(text.replace("num_layers = 2", "num_layers = 3"))
    with pytest.raises(CheckpointError, match=r"has no model\.layers\.2"):
        open_model(trained, tmp_path / "other.toml")


def test_code_named_by_a_folder_is_not_executed(trained, tmp_path):
    run = shutil.copytree(trained, tmp_path / "run")
    code = tmp_path / "evil.py"
    code.write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom shardtrain.models.llama3 import *\n"
    )
    config = run / "config.resolved.toml"
    config.write_text(config.read_text().replace('name = "llama3"', f'name = "{code}"'))

    with pytest.raises(ConfigError, match=r"is a Python file named in .*--config"):
        open_model(run)
    assert not (tmp_path / "ran").exists()


def test_a_recurrence_without_a_state_in_the_layout_requires_no_cache(tmp_path, capfd):
    # a cached pass would restart the recurrence and the convolution of Griffin with each new token
    griffin = Path(__file__).parents[2] / "models" / "others" / "griffin.py"
    config = tiny_config(
        job={"dump_folder": str(tmp_path / "run")},
        model={"name": str(griffin), "flavor": "tiny"},
        training={"steps": 1, "seq_len": 16},
        checkpoint={"enable": True, "interval": 1},
    )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, overrides={}))
    run_ranks(1, train_one, config)
    run = tmp_path / "run"
    config_file = str(run / "config.resolved.toml")
    arguments = ("--from", str(run), "--config", config_file, "--prompt", "ab")
    code, _, err = answer(capfd, *arguments)

    assert code == 2
    assert "add --no_cache" in err
    assert "mixes tokens outside of the attention core" in err

    # The suggested option fixes the error.
    code, out, _ = answer(capfd, *arguments, "--no_cache", "--max_new_tokens", "2")
    assert code == 0
    assert out


def test_the_compute_dtype_can_be_chosen(trained):
    opened = open_model(trained, dtype="bfloat16")
    assert {p.dtype for p in opened.model.parameters()} == {torch.bfloat16}
    new = Generator(opened.model, opened.layout, 258).generate(
        [[256, *SENTENCES[0][:4].encode()]], 36, stop_ids=frozenset({257})
    )
    assert bytes(new[0][:-1]).decode() == SENTENCES[0][4:]


def test_help_needs_no_torch():
    program = (
        "import sys; from shardtrain import cli; assert cli.main(['generate', '--help']) == 0; "
    )
    program += "sys.exit('torch' in sys.modules)"
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=patience.seconds(60),
        env=paths,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert "--max_new_tokens" in result.stdout, result.stderr


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("reward_model", "shardtrain test.*does not predict the next token"),
        ("image_text", "passes no images to a model.*shardtrain generate"),
    ],
)
def test_task_that_generate_does_not_support_is_refused(tmp_path, task, message):
    config_file = tmp_path / "run.toml"
    config_file.write_text(f'[task]\nname = "{task}"\n')
    with pytest.raises(ConfigError, match=message):
        open_model(tmp_path, config_file)
