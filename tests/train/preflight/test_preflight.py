"""``config check`` has the verdict of ``train``: the same exit status and the same lines, without starting ranks.

``train`` runs in a fork of the tests, without its steps. Everything before the first step is real, on one rank, so an
error that the check does not find would make a test fail.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import forked
import patience
import pytest
import tiny_tokenizers
from tiers import cases

from shardtrain import cli, config
from shardtrain.launch import local
from shardtrain.launch.child_watch import ChildWatch
from shardtrain.train import trainer
from shardtrain.train.preflight import (
    PreflightResult,
    judge,
    machine,
    memory_fit,
    meta_model,
    require,
    require_in_child,
)
from shardtrain.utils.errors import ConfigError, ShardtrainError
from shardtrain.utils.units import format_bytes

SMALL = """
[job]
dump_folder = "run"
[model]
flavor = "debugmodel"
hf_assets_path = "bytes"
[model.overrides]
num_layers = 2
dim = 32
ffn_dim = 32
vocab_size = 320
[training]
dataset = "jsonl"
dataset_path = "rows.jsonl"
steps = 2
seq_len = 32
local_batch_size = 2
device = "cpu"
"""
TASK = "from shardtrain.tasks.text_task import TextTask\n\n\nclass Mine(TextTask):\n    pass\n"
FAILING_TASK = """
from shardtrain.tasks.task import RowTask


class Task(RowTask):
    def read_rows(self, split):
        return self.nothing
"""
MODEL = "from shardtrain.models.llama3 import FLAVORS, LAYOUT, Config, initial\n"
LARGE_TOKENIZER = """
class Tokenizer:
    vocab_size, bos_id, eos_id = 500, 498, 499

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(ids).decode()

    def spans(self, text):
        return [(i, i + 1) for i in range(len(text))]
"""
ROWS_320 = Path(__file__).parents[2] / "fixtures/search/llama"
"""Hugging Face folder of a model with 320 embedding rows."""
PAIR = {"chosen": "a good answer", "rejected": "a bad one", "prompt": "a question"}

# name -> arguments after the file, which is SMALL with the lines of ADDED
FAULTY: dict[str, list[str]] = {
    # paths
    "dataset absent": ["--training.dataset_path=absent.jsonl"],
    "pattern without a file": ["--training.dataset_path=absent/*.jsonl"],
    "folder without files": ["--training.dataset_path=empty_folder"],
    "validation absent": [
        "--validation.enable", "--validation.dataset=jsonl", "--validation.dataset_path=absent.jsonl",
    ],
    "initial weights absent": ["--checkpoint.enable", "--checkpoint.initial_load_path=absent"],
    "initial weights of an empty folder": ["--checkpoint.enable", "--checkpoint.initial_load_path=empty_folder"],
    "hub folder of nothing": [
        "--checkpoint.enable", "--checkpoint.initial_load_path=empty_folder", "--checkpoint.initial_load_in_hf",
    ],
    "no such step": ["--checkpoint.enable", "--checkpoint.load_step=7"],
    "run folder is a file": ["--job.dump_folder=rows.jsonl"],
    "run folder below a file": ["--job.dump_folder=rows.jsonl/run"],
    "run folder with a name that is too long": ["--job.dump_folder=" + "ä" * 128],
    "run folder too far down": ["--job.dump_folder=" + "d/" * 2040],
    "run folder at home": ["--job.dump_folder=~/run"],
    "template absent": ["--data.format=chat", "--data.chat_template=absent.jinja"],
    "model file absent": ["--model.name=absent.py"],
    "task file absent": ["--task.name=absent.py"],
    "dataset file absent": ["--training.dataset=absent.py"],
    # tokenizers
    "tokenizer absent": ["--model.hf_assets_path=absent"],
    "folder without a tokenizer": ["--model.hf_assets_path=empty_folder"],
    "tokenizer is not JSON": ["--model.hf_assets_path=broken.json"],
    "tokenizer is empty": ["--model.hf_assets_path=empty.json"],
    "sentencepiece of nothing": ["--model.tokenizer_path=broken.model"],
    "tokenizer is too large": ["--model.overrides.vocab_size=256"],
    "own tokenizer is too large": ["--model.tokenizer_path=large_tokenizer.py"],
    "own tokenizer is too large for answers": [
        "--model.tokenizer_path=large_tokenizer.py", "--task.name=orpo", "--training.dataset_path=pairs.jsonl",
    ],
    "teacher has fewer rows": [
        "--model.tokenizer_path=large_tokenizer.py", "--model.overrides.vocab_size=512", "--task.name=distillation",
        f"--task.teacher_path={ROWS_320}",
    ],
    "reference has fewer rows": [
        "--model.tokenizer_path=large_tokenizer.py", "--model.overrides.vocab_size=512", "--task.name=preference",
        "--training.dataset_path=pairs.jsonl", f"--task.reference_path={ROWS_320}",
    ],
    "no token ends a text": ["--data.separator="],
    # data
    "empty file": ["--training.dataset_path=empty.jsonl"],
    "empty rows": ["--training.dataset_path=blank.jsonl"],
    "wrong format": ["--data.format=chat"],
    "wrong column": ["--data.text_field=body"],
    "rows of another kind": ["--data.format=prompt_completion"],
    "no JSON": ["--training.dataset_path=broken.jsonl"],
    "a bad row late": ["--training.dataset_path=late.jsonl"],
    "fewer than one step": ["--training.seq_len=4096", "--training.local_batch_size=8", "--training.steps=2"],
    "too few for the steps": ["--training.steps=100000"],
    "too few rows of pairs": [
        "--task.name=orpo", "--training.dataset_path=pairs.jsonl", "--training.steps=1000",
    ],
    "rows without pairs": ["--task.name=orpo"],
    "labels absent": ["--task.name=classification", "--task.num_labels=2"],
    "not tokens": ["--training.dataset=tokens"],
    "damaged shards": ["--training.dataset=tokens", "--training.dataset_path=empty_folder"],
    "parquet of text": ["--training.dataset=parquet", "--training.dataset_path=rows.jsonl"],
    "no column of a table": ["--training.dataset=tsv", "--training.dataset_path=rows.tsv"],
    "bad rows beyond the share": ["--training.dataset_path=broken.jsonl", "--data.bad_rows=skip"],
    "a template of undefined names": ["--data.template.text={{ nothing.at.all }}"],
    # unavailable features
    "float8": ["--model.converters=quantize.linear.float8"],
    "replica groups": ["--fault_tolerance.enable"],
    "memory estimation": ["--memory_estimation.enable"],
    "custom import": ["--experimental.custom_import=mine"],
    "update in backward": ["--optimizer.early_step_in_backward"],
    "DeepEP": ["--parallelism.expert_parallel_comm_backend=deepep"],
    "no CUDA": ["--training.device=cuda"],
    "memory snapshot": ["--profiling.enable_memory_snapshot"],
    # tasks and models
    "not a task": ["--task.name=text_task"],
    "the task's base": ["--task.name=task"],
    "misspelt task": ["--task.name=preferense"],
    "task file without a task": ["--task.name=no_task.py"],
    "model file without a model": ["--model.name=no_model.py"],
    "model file that fails": ["--model.name=failing_model.py"],
    "flavor": ["--model.flavor=8b"],
    "heads": ["--model.overrides.num_heads=3"],
    "no module for adapters": ["--lora.enable", "--lora.random_base", "--lora.target_modules=layers.*.nothing"],
    "too large for this machine": ["--model.overrides.dim=65536", "--model.overrides.ffn_dim=65536"],
    "batches too large for this machine": ["--training.local_batch_size=99999999", "--training.on_data_end=repeat"],
    "steps too large for this machine": [
        "--training.global_batch_size=1999999998", "--training.on_data_end=repeat",
    ],
    # code that ends the program
    "dataset file that exits": ["--training.dataset=exits.py"],
    "sink that exits": ["--metrics.sinks=exits.py"],
    "task that exits": ["--task.name=exits.py"],
    "model that exits": ["--model.name=exiting_model.py"],
    # addresses
    "store that is not known": ["--checkpoint.enable", "--checkpoint.folder=s4://bucket/run"],
    "run folder is an address": ["--job.dump_folder=s3://bucket/run"],
    "run folder without a name": ["--job.dump_folder="],
    # several errors
    "unknown key and others": ["--training.stepz=3", "--training.dataset_path=absent.jsonl", "--task.name=text_task"],
    "wrong type and others": ["--optimizer.lr=fast", "--model.hf_assets_path=absent", "--fault_tolerance.enable"],
    "four at once": [
        "--training.dataset_path=absent.jsonl", "--model.hf_assets_path=absent", "--training.device=cuda",
        "--checkpoint.enable", "--checkpoint.initial_load_path=absent",
    ],
    "wrong mesh": ["--parallelism.data_parallel_shard_degree=3"],
    "batch": ["--training.global_batch_size=3"],
    # options of single features
    "mlm": ["--task.name=masked_language_model", "--model.name=encoder", "--model.flavor=debugmodel"],
    "mlm on llama": ["--task.name=masked_language_model"],
    "cls no labels": ["--task.name=classification"],
    "seq2seq": ["--task.name=sequence_to_sequence"],
    "add_bos": ["--data.add_bos", "--model.hf_assets_path=nobos"],
    "transformers absent": [
        "--model.name=transformers", "--model.hf_assets_path=empty_folder", "--model.tokenizer_path=bytes",
    ],
    "lora init": [
        "--lora.enable", "--lora.random_base", "--checkpoint.enable", "--lora.initial_load_path=empty_folder",
    ],
    "lora rank": ["--lora.enable", "--lora.random_base", "--lora.rank=4096"],
    "muon": ["--optimizer.name=Muon", "--optimizer.muon_adamw_patterns=nothing*"],
    "scale": ["--training.mixed_precision_param=float16", "--training.initial_loss_scale=-1"],
    "scale2": ["--training.mixed_precision_param=float16", "--training.loss_scale_growth_interval=0"],
    "prof": ["--profiling.enable_profiling", "--profiling.profile_freq=1"],
    "val empty": ["--validation.enable", "--validation.dataset=jsonl", "--validation.dataset_path=empty.jsonl"],
    "val wrong": ["--validation.enable", "--validation.dataset=jsonl", "--validation.dataset_path=broken.jsonl"],
    "ckpt folder": ["--checkpoint.enable", "--checkpoint.folder=../rows.jsonl"],
    "ckpt abs": ["--checkpoint.enable", "--checkpoint.folder=/proc/nothing"],
    "kto": ["--task.name=kto", "--training.dataset_path=pairs.jsonl"],
    "dist": ["--task.name=distillation", "--task.teacher_path=absent"],
    "dist2": ["--task.name=distillation", "--task.teacher_path=empty_folder"],
    "hf absent": ["--training.dataset=huggingface", "--training.dataset_path=./absent"],
    "hf folder": ["--training.dataset=huggingface", "--training.dataset_path=empty_folder"],
    "tb": ["--metrics.enable_tensorboard", "--metrics.save_tb_folder=/proc/x"],
    "logfile": ["--metrics.save_log_file=/proc/x/{rank}"],
    "wandb": ["--metrics.enable_wandb"],
    "per epoch": [
        "--validation.enable", "--validation.per_epoch", "--validation.dataset=jsonl",
        "--validation.dataset_path=rows.jsonl",
    ],
    "last batch": [
        "--task.name=orpo", "--training.dataset_path=pairs.jsonl", "--training.last_batch=discard",
        "--training.local_batch_size=16",
    ],
    "keep best": ["--checkpoint.enable", "--checkpoint.keep_best=validation.nothing"],
    "chat none": ["--data.format=chat", "--data.messages_field=text"],
    "long drop": ["--data.packing=first_fit", "--data.long_documents=drop", "--training.seq_len=8"],
    "two sources": [
        "--data.sources.a.dataset=jsonl", "--data.sources.a.dataset_path=absent", "--data.sources.b.dataset=jsonl",
        "--data.sources.b.dataset_path=empty.jsonl", "--training.dataset=python_stdlib",
    ],
    "own dataset fails": ["--training.dataset=failing_model.py"],
    "own dataset none": ["--training.dataset=no_task.py"],
    "own task fails": ["--task.name=failing_task.py"],
    "compile": ["--compile.enable", "--compile.backend=nothing"],
    "threads": ["--comm.init_timeout_seconds=0"],
    "ac": ["--activation_checkpoint.mode=memory_budget"],
    "stream bad": ["--data.mode=stream", "--training.dataset_path=broken.jsonl"],
    "stream blank": ["--data.mode=stream", "--training.dataset_path=blank.jsonl"],
    "stream column": ["--data.mode=stream", "--data.text_field=body"],
}  # fmt: skip
SOUND: dict[str, list[str]] = {
    "unchanged": [],
    "repeats": ["--training.steps=100000", "--training.on_data_end=repeat"],
    "stops": ["--training.steps=100000", "--training.on_data_end=stop"],
    "accumulates": ["--training.global_batch_size=8"],
    "bad rows skipped": [
        "--training.dataset_path=late.jsonl", "--data.bad_rows=skip", "--data.bad_rows_max_fraction=0.5",
    ],
    "pairs": ["--task.name=orpo", "--training.dataset_path=pairs.jsonl"],
    "adapters": ["--lora.enable", "--lora.random_base", "--lora.target_modules=layers.*.attn.wq"],
    "validates": ["--validation.enable", "--validation.dataset=jsonl", "--validation.dataset_path=rows.jsonl"],
    "streams": ["--data.mode=stream", "--data.readers=4"],
    "checkpoints": ["--checkpoint.enable"],
    "table": ["--training.dataset=tsv", "--training.dataset_path=rows.tsv", "--data.text_field=words"],
}  # fmt: skip
CHEAP = ("dataset absent", "wrong column", "too few for the steps", "not a task", "unknown key and others",
         "run folder is a file", "too large for this machine", "dataset file that exits", "run folder is an address",
         "batches too large for this machine")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Valid and invalid files of every kind that a configuration can name."""
    created = tmp_path_factory.mktemp("verdict")
    rows = [json.dumps({"text": f"row {number} " + "of some words " * 20}) for number in range(40)]
    files = {
        "run.toml": SMALL,
        "rows.jsonl": "\n".join(rows) + "\n",
        "late.jsonl": "\n".join([*rows, "{"]) + "\n",
        "blank.jsonl": '{"text": ""}\n' * 4,
        "empty.jsonl": "",
        "broken.jsonl": "{\n" * 4,
        "rows.tsv": "words\tother\n" + "a row of words\tb\n" * 60,
        "pairs.jsonl": (json.dumps(PAIR) + "\n") * 8,
        "broken.json": "{",
        "empty.json": "",
        "broken.model": "this is not a model",
        "large_tokenizer.py": LARGE_TOKENIZER,
        "no_task.py": TASK,
        "no_model.py": MODEL,
        "failing_task.py": FAILING_TASK,
        "exits.py": "import sys\nopen_source = Task = Sink = None\nsys.exit(0)\n",
        "exiting_model.py": MODEL
        + "import sys\nif True:\n    sys.exit(0)\n\n\nclass Model:\n    pass\n",
        "failing_model.py": MODEL + "class Model:\n    pass\n\n\nabsent_name\n",
    }
    for name, text in files.items():
        (created / name).write_text(text)
    (created / "empty_folder").mkdir()
    tiny_tokenizers.bpe_folder(created / "nobos", special=())
    return created


def checked(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> tuple[int, list[str]]:
    """Return exit status and errors of the check."""
    status = cli.main(["config", "check", "run.toml", "--nproc=1", *arguments])
    captured = capsys.readouterr()
    assert not captured.err, captured.err
    return status, [line[7:] for line in captured.out.splitlines() if line.startswith("error: ")]


def started(arguments: list[str]) -> tuple[int, list[str]]:
    """Return exit status and errors of ``train`` without steps."""
    command = [sys.executable, "-m", "shardtrain", "train", "run.toml", "--nproc=1", *arguments]
    done = forked.run(command, capture_output=True, text=True, timeout=patience.seconds(120))
    errors = [line for line in done.stderr.splitlines() if line.startswith("error[")]
    assert "Traceback" not in done.stderr
    return done.returncode, [line.partition("]: ")[2] for line in errors]


@pytest.fixture
def no_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``train`` end before its first step."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(trainer, "_steps", lambda *_: None)


@pytest.mark.parametrize(
    "name", cases(CHEAP, nightly=[name for name in FAULTY if name not in CHEAP])
)
@pytest.mark.usefixtures("no_steps")
def test_check_reports_the_errors_of_train_in_the_same_lines(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = checked(capsys, FAULTY[name])
    assert status in (2, 3, 5)
    assert lines
    assert len(set(lines)) == len(lines)
    assert started(FAULTY[name]) == (status, lines)


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_problem_of_two_datasets_is_one_line_of_the_error(repeats: int) -> None:
    """Both datasets read the tokenizer, for example, so both report the same problem."""
    result = PreflightResult(errors=(ConfigError(["the tokenizer is damaged"] * repeats),))
    with pytest.raises(ConfigError) as caught:
        result.raise_errors()
    assert [*map(str, caught.value.problems)] == result.lines == ["the tokenizer is damaged"]


@pytest.mark.parametrize("name", cases(["unchanged"], nightly=[*SOUND][1:]))
@pytest.mark.usefixtures("no_steps")
def test_configuration_that_passes_the_check_starts(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(capsys, SOUND[name]) == (0, [])
    assert started(SOUND[name]) == (0, [])


@pytest.mark.usefixtures("no_steps")
def test_check_counts_ranks_of_other_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config", "check", "run.toml", "--nnodes=2"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert started(["--nnodes=2"]) == (2, [line.partition("]: ")[2] for line in errors])
    assert len(errors) == 1
    assert "the rendezvous endpoint is not set" in errors[0]

    arguments = [
        "--nnodes=2",
        "--rdzv_endpoint=here:29500",
        "--parallelism.data_parallel_shard_degree=2",
    ]
    # --nproc counts ranks per node, so two nodes have the two ranks of the mesh
    assert cli.main(["config", "check", "run.toml", "--nproc=1", *arguments]) == 0


@pytest.fixture
def small_disks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the free bytes of every file system."""

    def shrink(free: int) -> None:
        monkeypatch.setattr(
            os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1, f_flag=0)
        )

    return shrink


def test_disk_without_space_for_a_checkpoint_is_rejected_with_the_numbers(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    small_disks: Callable[[int], None],
) -> None:
    monkeypatch.chdir(folder)
    arguments = [
        "--checkpoint.enable",
        "--checkpoint.interval=1",
        "--training.steps=20",
        "--training.on_data_end=repeat",
    ]
    loaded = config.load("run.toml", arguments)
    _, parameters = meta_model.build(loaded.config)
    assert parameters is not None
    size = memory_fit.checkpoint_bytes(loaded.config, parameters)
    for free, code, message in (
        (int(1.1 * size), 8, "1.2 times the size of a checkpoint"),
        (int(3 * 1.2 * size) + 9, 0, "enough for only 3"),
        (
            int(11 * 1.2 * size) + 9,
            0,
            "",
        ),  # ten are kept, and the eleventh is written before the first is deleted
    ):
        small_disks(free)
        verdict = judge(loaded, machine.this_machine(loaded, 1))
        lines = [line for line in (*verdict.lines, *verdict.warnings) if "checkpoint" in line]

        assert verdict.exit_code == code, lines
        assert len(lines) == (1 if message else 0), lines
        assert message in "".join(lines), lines
        assert not message or (format_bytes(size) in lines[0] and format_bytes(free) in lines[0])

        if message and not code:
            require(loaded, machine.this_machine(loaded, 1))
            assert capsys.readouterr().err == f"warning: {lines[0]}\n"

    assert not judge(
        config.load("run.toml", arguments[1:]), machine.this_machine(loaded, 1)
    ).lines  # saves are disabled


def test_workers_whose_batches_exceed_shared_memory_are_rejected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, small_disks: Callable[[int], None]
) -> None:
    monkeypatch.chdir(folder)
    loaded = config.load("run.toml", ["--training.dataloader.num_workers=2"])
    # workers, prefetched batches, bytes per token, rows, tokens per row
    needed = 2 * 4 * 24 * 2 * 32
    small_disks(needed)

    assert not judge(loaded, machine.this_machine(loaded, 1)).lines

    small_disks(needed - 1)
    (line,) = judge(loaded, machine.this_machine(loaded, 1)).lines
    assert "training.dataloader.num_workers=2" in line
    assert format_bytes(needed) in line


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(
    sys.platform != "linux", reason="counts threads in /proc, and ranks are forked only on Linux"
)
@pytest.mark.parametrize(
    "arguments",
    [[], ["--training.steps=100000"], ["--training.seq_len=0", "--job.dump_folder=rows.jsonl"]],
)
@pytest.mark.usefixtures("no_steps")
def test_process_that_will_fork_opens_no_files_itself(folder: Path, arguments: list[str]) -> None:
    """Tokenizers and Arrow start threads. A lock held by such a thread is never released in a forked rank."""
    tiny_tokenizers.bpe_folder(folder / "bpe")
    loaded = config.load("run.toml", ["--model.tokenizer_path=bpe", *arguments], keep_problems=True)
    before = threads()
    in_child: ShardtrainError | None = None
    try:
        require_in_child(loaded, machine.this_machine(loaded, 1), ChildWatch())
    except ShardtrainError as error:
        in_child = error

    assert threads() == before

    try:
        require(loaded, machine.this_machine(loaded, 1))
    except ShardtrainError as error:
        assert in_child is not None
        assert (type(in_child), str(in_child)) == (type(error), str(error))
    else:
        assert in_child is None
        assert not arguments


@pytest.mark.usefixtures("no_steps")
def test_machine_option_decides_which_checks_run(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "config",
        "check",
        "run.toml",
        "--training.dataset_path=absent",
        "--model.hf_assets_path=absent",
    ]
    large = [
        "--model.overrides.dim=8192",
        "--model.overrides.ffn_dim=32768",
        "--model.overrides.num_layers=32",
    ]
    # only the file: rules, but no paths or memory
    assert cli.main([*arguments, *large, "--for-machine", "none"]) == 0
    assert cli.main([*arguments, "--for-machine=none", "--training.seq_len=0"]) == 2

    capsys.readouterr()
    # another machine: memory and dtypes, but no paths
    large += ["--training.device=cuda"]
    assert cli.main([*arguments, *large, "--for-machine", "h100"]) == 2
    assert "h100 has 79.10 GiB" in capsys.readouterr().out
    assert cli.main([*arguments, *large, "--for-machine", "H100", "--nproc=64"]) == 0
    assert cli.main([*arguments, "--training.device=cuda", "--for-machine", "v100"]) == 0
    assert "no bfloat16 units" in capsys.readouterr().out
    assert cli.main([*arguments, "--for-machine", "h1000"]) == 2
    assert "did you mean h100?" in capsys.readouterr().err
    assert cli.main([*arguments, "--for-machine"]) == 2


@pytest.mark.parametrize(
    ("rank", "ranks", "begins"), [("0", "65", False), ("3", "65", True), ("3", "64", False)]
)
@pytest.mark.usefixtures("no_steps")
def test_first_of_many_ranks_checks_files_for_all(
    rank: str,
    ranks: str,
    begins: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rank 0 checks shared storage once before rendezvous. Every rank checks its local resources."""
    names = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "127.0.0.1",
    }
    for name, value in {**names, "MASTER_PORT": "29999"}.items():
        monkeypatch.setenv(name, value)
    begun: list[str] = []
    monkeypatch.setattr(local, "run_rank", lambda *_: begun.append(rank) or 0)
    monkeypatch.setattr(local, "leave", lambda code: None)
    batch_size = 512 if ranks == "64" else 520
    arguments = ["train", "run.toml", "--training.dataset_path=broken.jsonl"]
    arguments += [f"--training.global_batch_size={batch_size}"]
    status = cli.main(arguments)
    errors = capsys.readouterr().err

    # Only the rank that checks the files stops. The other ranks begin.
    assert (begun == [rank]) == begins, errors
    if not begins:
        assert status == 3
        assert "broken.jsonl" in errors

    # Every rank checks the options.
    assert cli.main([*arguments, "--training.seq_len=0"]) == 2


@pytest.mark.usefixtures("no_steps")
def test_bytes_of_a_rank_follow_from_shapes_layout_and_mesh() -> None:
    def needed(nproc: int, *arguments: str) -> int:
        loaded = config.load("run.toml", arguments)
        errors, parameters = meta_model.build(loaded.config)
        assert not errors
        assert parameters is not None
        return memory_fit.state_bytes(loaded.config, nproc, parameters)

    one_rank = needed(1)
    errors, parameters = meta_model.build(config.load("run.toml").config)

    assert not errors
    assert parameters is not None
    # weights, gradients and two AdamW states
    assert one_rank == 4 * 4 * sum(one.num_elements for one in parameters)
    assert needed(4) == one_rank // 4

    replicas = ["--parallelism.data_parallel_replicate_degree=2"]
    assert needed(2, *replicas) == one_rank
    assert needed(2, *replicas, "--parallelism.shard_optimizer_states") == one_rank * 3 // 4

    split = needed(2, "--parallelism.tensor_parallel_degree=2")
    assert one_rank // 2 < split < one_rank  # norms are replicated
    assert needed(1, "--training.dtype=bfloat16") == one_rank // 2
    assert (
        needed(1, "--lora.enable", "--lora.random_base", "--lora.target_modules=layers.*.attn.wq")
        < one_rank // 2
    )


@pytest.mark.usefixtures("no_steps")
def test_model_accepted_without_importing_torch_fits() -> None:
    for flavor in ("debugmodel", "8B", "70B"):
        loaded = config.load(
            "run.toml", [f"--model.flavor={flavor}", "--model.overrides.vocab_size=128256"]
        )
        errors, parameters = meta_model.build(loaded.config)
        assert not errors
        assert parameters is not None

        needed = memory_fit.state_bytes(loaded.config, 1, parameters)
        for share in (0.9, 1.1, 2.0, 8.0):
            device_machine = machine.Machine(
                1, 1, "cuda", 1, "a device", int(needed * share), is_here=False
            )
            if memory_fit.certainly_fits(loaded, device_machine):
                assert share > 1
            assert bool(judge(loaded, device_machine).errors) == (share < 1)


def test_more_ranks_than_accelerators_are_rejected_in_one_line() -> None:
    """The check precedes the start of ranks, which would fail with a CUDA traceback."""
    loaded = config.load("debug")
    for device, ranks, devices, refused in (
        ("cuda", 2, 1, True),
        ("cuda", 9, 8, True),
        ("cuda", 8, 8, False),
        ("cpu", 9, 0, False),
        (None, 9, None, False),
    ):
        device_machine = machine.Machine(
            ranks, ranks, device, devices, "a device", 1 << 40, is_here=False
        )
        problems = []
        for error in judge(loaded, device_machine).errors:
            problems += [str(problem) for problem in error.problems]

        assert len(problems) == int(refused), problems
        if refused:
            assert problems[0].startswith(f"ranks of this machine={ranks} exceeds its ")
            assert f"--nproc {devices}" in problems[0]


def test_nearest_names_are_suggested_for_sections_and_platforms(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "typo.toml").write_text("[trainning]\nsteps = 3\nseq_len = 0\n[optimiser]\nlr = 1\n")
    assert cli.main(["config", "check", str(folder / "typo.toml")]) == 2
    errors = [line for line in capsys.readouterr().out.splitlines() if line.startswith("error")]
    assert len(errors) == 2
    assert "did you mean [training]?" in errors[0]
    assert "did you mean [optimizer]?" in errors[1]
    for arguments, name in (
        (["launch", "slrum"], "slurm"),
        (["launch", "kubernets"], "kubernetes"),
        (["config", "chek"], "check"),
    ):
        assert cli.main(arguments) == 2
        assert f"did you mean {name}?" in capsys.readouterr().err
