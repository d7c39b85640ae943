"""A mistaken command prints one line that ends with a fix, and starts nothing."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import forked
import patience
import pytest
from tiers import cases

# arguments of `shardtrain`, and a part of the message that contains the fix
MISTAKES = {
    "trian": "did you mean train?",
    "resume outputs": "did you mean train?",
    "finetune debug": "did you mean train?",
    "eval outputs": "did you mean evaluate?",
    "train missing.toml": "does not exist; did you mean section.toml?",
    "train lama3_8b": "did you mean llama3_8b?",
    "train debug llama3_8b": "is a second configuration; name one file, and options after it",
    "train --nproc 2 --training.steps=3 debug": "write debug before all options",
    "train debug.toml": "the preset of that name comes with the package: write debug",
    "train configs/llama3_8b.toml": "the preset of that name comes with the package: write llama3_8b",
    "train --config debug.toml": "the configuration is the first argument: shardtrain train debug.toml",
    "train run.yaml": "known systems are pytorch_universal_trainer",
    "train invalid.toml": "invalid.toml:2: the file is not valid TOML",
    "train twice.toml": "twice.toml:3: the file is not valid TOML",
    "train section.toml": "section.toml:1: [trainning] is not a section; did you mean [training]?",
    "train flat.toml": "flat.toml:1: steps=3 is not an option; did you mean training.steps?",
    "train --resume": "repeat its command with the same job.dump_folder",
    "train debug --training.step 10": "did you mean training.steps?",
    "train debug --steps 10": "did you mean training.steps?",
    "train debug training.steps=10": "write --training.steps=10",
    "train debug -training.steps 10": "write --training.steps",
    "train debug --training.steps": "has no value; write --training.steps VALUE",
    "train debug --training.steps ten": "must be an integer; write a whole number",
    "train debug --training.steps 0": "must be at least 1; use 1 or more",
    "train debug --training.global_batch_size 7": "times 2 data-parallel ranks; use 8, or -1",
    "train debug --nproc 0": "write it like --nproc 2",
    "train debug --model.flavor 8b": "did you mean 8B?",
    "train debug --model.hf_assets_path ./tokenizer": 'shardtrain data download"), or use "bytes"',
    "train debug --training.dataset text": "requires a file or folder; set it",
    "train debug --training.dataset text --training.dataset_path nowhere.txt": "does not exist; correct the path",
    "train debug --training.dataset text --training.dataset_path empty": "name a folder that contains some",
    "train debug --training.dataset jsonl --training.dataset_path text.txt": 'or set data.bad_rows="skip"',
    "train debug --optimizer.name adamw": 'did you mean "AdamW"?',
    "train debug --optimizer.lr 0,001": "write a number such as 0.1 or 3e-4",
    "train debug --checkpoint.enable yes": "write --checkpoint.enable or --checkpoint.enable false",
    "train debug --activation_checkpoint.mode always": 'use "selective"',
    "train debug --training.dtype bf16": 'did you mean "bfloat16"?',
    "train debug --training.device cuda": 'use "cpu" or "auto"',
    "generate nowhere --prompt hello": "nowhere",
    "generate": "write it like: shardtrain generate outputs --prompt",
    "export unsaved": "--to is required: the folder to write; name a new folder",
    "import empty": "write it like: shardtrain import HF_FOLDER --to outputs/model",
    "evaluate": "write it like: shardtrain evaluate outputs --data",
    "report empty": "name the folder of a run, which is its job.dump_folder",
    "watch text.txt": "name the folder of a run, which is its job.dump_folder",
    "profile unsaved": "train with --profiling.enable_profiling",
    "checkpoint verify unsaved": "or a run that has saved",
    "checkpoint list unsaved": "did you mean ls?",
    "launch slrm": "did you mean slurm?",
    "launch ssh debug": "use --hosts a,b or --hostfile FILE",
    "launch kubernetes": "scripts/containers/Dockerfile",
    "plan --device h1000": "did you mean h100?",
    "init there.toml": "exists; name a new file",
    "init my": "write my.toml",
    "config chek debug": "did you mean check?",
    "config help trainin": "did you mean training?",
    "data shw": "did you mean show?",
    "data download": "--repo_id meta-llama/Llama-3.1-8B",
    "verify debug --mesh tp2": "write tp=2",
    "version": "did you mean --version?",
    "--nproc 2 train debug": "the verb comes first, as in shardtrain train debug --nproc 2",
    "train there.toml section.toml": "is a second file; use one configuration file",
    "train empty": "is a folder; name the TOML file in it",
    "train debug --gpus 2": "the number of processes is --nproc N",
    "train debug --batch_size 8": "did you mean training.local_batch_size",
    "train debug --learning_rate 1e-3": "did you mean optimizer.lr?",
    "train debug --max_steps 100": "did you mean training.steps?",
    "train debug --output_dir out": "did you mean job.dump_folder?",
    "train debug --save_steps 100": "did you mean checkpoint.interval?",
    "train debug --wandb": "did you mean metrics.enable_wandb?",
    "train debug --parallelism.fsdp 2": "did you mean parallelism.data_parallel_shard_degree?",
    "train debug --tp 2": "did you mean parallelism.tensor_parallel_degree?",
    "train debug --compile": "write --compile.enable, or --compile.KEY VALUE",
    "train debug --training.mixed_precision_param fp16": 'did you mean "float16"?',
    "train debug --checkpoint.interval 5min": "must be an integer; write a whole number",
    "plan llama3_8b --gpu 8": "did you mean --gpus?",
    "generate unsaved --promt hello": "did you mean --prompt?",
    "generate unsaved --prompt hello --top_k 5": "has no effect at --temperature 0",
    "report": "write it like shardtrain report outputs -o report.html",
    "replay three unsaved": "write it like 120 or 100:120",
    "data prepare": "write --output FOLDER",
    "config help optimzer.lr": "did you mean optimizer.lr?",
    "train llama3-8b": "did you mean llama3_8b?",
    "train debug --training.steps 10.5": "write 10 or 11",
    "train debug --training.seq_len 0": "use 1 or more",
    "train debug --job.dump_folder there.toml": "is a file; choose another folder",
    "train debug --data my.jsonl": "a file of yours is --training.dataset text --training.dataset_path my.jsonl",
    "train debug --lora": "write --lora.enable, or --lora.KEY VALUE",
    "train debug --training.dataset_path text.txt": 'remove it, or use the dataset "text"',
    "train debug --resume_from_checkpoint outputs/checkpoint/step-10": "repeat its command with the same",
    "train debug --seed abc": "did you mean debug.seed?",
    "train debug --model.name gpt2": "transformers is any architecture of that library",
    "train debug --task.name dpo": "did you mean preference?",
    "train debug --task.name SFT": "did you mean language_model?",
    "train debug --optimizer.lr=-1": "optimizer.lr=-1",
    "train debug --training.local_batch_size 0": "training.local_batch_size=0",
    "generate unsaved --prompt hello": "name a run that saved checkpoints",
    "generate unsaved --prompt hello --temperature=-1": "use 0, or about 0.7 to 1",
    "merge unsaved --to merged": "name a run that saved checkpoints",
    "evaluate unsaved --data text.txt": "write it like --data books=books.jsonl",
    "evaluate unsaved --data val=nowhere.txt": "correct the path",
    "checkpoint diff unsaved": "shardtrain checkpoint diff outputs/checkpoint/step-100 outputs/checkpoint/step-200",
    "config migrate run.yaml -o new.toml": "known systems are pytorch_universal_trainer",
    "init new.toml llama3_9b": "did you mean llama3_8b?",
    "plan llama3_8b --gpus eight": "write it like --gpus 64",
    "verify debug --mesh foo=2": "axes are dp_replicate",
    "goodput empty": "name the folder of a run",
    "runs nowhere": "name a folder with runs",
    "launch": "requires a platform; use one of local",
    "launch logs": "requires one ID; use an ID such as slurm/1234",
    "completion tcsh": "fish",
    "Train debug": "did you mean train?",
    "start debug": "did you mean train?",
    "status": "did you mean launch status?",
    "help trian": "did you mean train?",
    "launch cancel": "did you mean stop?",
    "train my.jsonl": "data as --training.dataset jsonl --training.dataset_path my.jsonl",
    "train text.txt": "data as --training.dataset text --training.dataset_path text.txt",
    "data check my.jsonl": "data as --training.dataset jsonl --training.dataset_path my.jsonl",
    "train model.safetensors": "weights to begin with are checkpoint.initial_load_path",
    "plan script.py": "a model of your own is --model.name script.py",
    "train utf16.toml": "save it as UTF-8",
    "train quoted.toml": "write it without quotes: 3",
    "train debug --Training.Steps 3": "did you mean training.steps?",
    "train debug --training.seq_len 128 --training.seq_len 256": "give it once",
    "train debug --training.dataset text --training.dataset_path a.txt b.txt c.txt": 'training.dataset_path "*.txt"',
    "train debug --optimizer.lr inf": "must be a finite number",
    "train debug --optimizer.beta1 1.5": "use for example 0.9",
    "train debug --lr_scheduler.decay_type cosin": 'did you mean "cosine"?',
    "train debug --parallelism.tensor_parallel_degree 3": "use 1, 2, 4 or 8",
    "train debug --parallelism.pipeline_parallel_degree 100": "use at most 4",
    "train debug --parallelism.expert_parallel_degree 2": "or use a model such as qwen3_moe",
    "train debug --float8.enable": "add quantize.linear.float8 to model.converters",
    "train debug --max_seq_length 1024": "did you mean training.seq_len?",
    "train debug --train_file my.jsonl": "did you mean training.dataset_path?",
    "train debug --max_grad_norm 1": "did you mean training.max_norm?",
    "train debug --num_train_epochs 3": "did you mean training.epochs?",
    "train debug --logging_steps 10": "did you mean metrics.log_freq?",
    "train debug --eval_steps 10": "did you mean validation.freq?",
    "train debug --gradient_checkpointing": "did you mean activation_checkpoint.mode?",
    "train debug --validation.interval 5": "did you mean validation.freq?",
    "train debug --num_layers 2": "did you mean model.overrides.num_layers?",
    "train debug --master_addr node1": "--rdzv_endpoint HOST:PORT",
    "train debug --checkpoint.load_step 100": "remove the option to start from step 0",
    "train debug --checkpoint.keep_latest_k 1": "keep 2 or more, or 0 for all",
    "train debug --training.dataset csv --training.dataset_path text.txt": "did you mean tsv?",
    "train debug --training.dataset tokens --training.dataset_path text.txt": 'made by "shardtrain data prepare"',
    "train debug --training.dataset text --training.dataset_path zero.txt": "use data with usable rows",
    "plan llama3_8b --serach": "did you mean --search?",
    "plan llama3_8b --tokens 1X": "write it like --tokens 15T",
    "plan llama3_8b --calibrate my.jsonl": "write one with shardtrain doctor --json > report.json",
    "plan llama3_8b --device gpu.toml": "devices_per_node is missing; add it, as in docs/plan.md",
    "plan llama3_8b --nodes 2 --gpus 9": "use one of them",
    'verify debug --mesh "tp=2 pp=2"': "write tp=2,pp=2",
    "config help lr": "did you mean optimizer.lr?",
    "init new.json": "write new.toml",
    "watch unsaved --interval 5": "did you mean --interval_seconds?",
    "export nowhere --to hf": "does not exist; use an existing checkpoint",
    "import gpt2 --to x": "`shardtrain data download --repo_id gpt2 --all`",
    "checkpoint ls": "write it like: shardtrain checkpoint ls outputs",
    "report unsaved -o report.pdf": "write -o report.html",
    "train debug --model.name ./missing.py": "give the path of a model file",
    "train debug --model.name meta-llama/Llama-3.1-8B": "--repo_id meta-llama/Llama-3.1-8B --all",
    "train debug --training.dataset allenai/c4": 'training.dataset_path="allenai/c4"',
    "verify --mesh tp=2 debug": "write debug before all options",
    "report loop": "name the folder of a run, which is its job.dump_folder",
    "generate loop --prompt hello": "name a run's folder or a checkpoint",
    "merge loop --to merged": "which is not a checkpoint; use another checkpoint",
    "doctor --jsn": "did you mean --json?",
}
FIRST = list(MISTAKES)[::8]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "invalid.toml": "[training]\nsteps = = 3\n",
        "twice.toml": "[training]\nsteps = 3\nsteps = 4\n",
        "section.toml": "[trainning]\nsteps = 3\n",
        "flat.toml": "steps = 3\n",
        "run.yaml": "training:\n  steps: 3\n",
        "there.toml": "",
        "quoted.toml": '[training]\nsteps = "3"\n',
        "gpu.toml": "[devices.mine]\nmemory_gib = 80\n",
        "my.jsonl": '{"txt": "hello"}\n' * 9,
        "model.safetensors": "weights",
        "script.py": "print(1)\n",
        "zero.txt": "",
        "text.txt": "hello world\n" * 20_000,
        "unsaved/config.resolved.toml": "[training]\nsteps = 3\n",
        "unsaved/metrics.jsonl": '{"step": 1, "loss": 2.0}\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "utf16.toml").write_text("[training]\nsteps = 3\n", encoding="utf-16")
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return tmp_path


@pytest.mark.parametrize(
    "typed", cases(FIRST, nightly=[typed for typed in MISTAKES if typed not in FIRST])
)
def test_mistake_is_reported_in_one_line_with_a_fix(typed: str, folder: Path) -> None:
    command = [sys.executable, "-m", "shardtrain", *shlex.split(typed)]
    done = forked.run(command, capture_output=True, text=True, timeout=patience.seconds(60))
    lines = done.stderr.strip().splitlines()

    assert done.returncode in (2, 3, 5), done.stderr
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith(f"error[{done.returncode}]: ")
    assert MISTAKES[typed] in lines[0]
    assert "Traceback" not in done.stderr

    # A wrong configuration (exit status 2) creates no file. Other refusals write only exit.json, for the launcher.
    allowed = set() if done.returncode == 2 else {"exit.json"}
    assert {path.name for path in (folder / "outputs").rglob("*")} <= allowed


def test_there_are_at_least_150_mistakes() -> None:
    assert len(MISTAKES) >= 150
