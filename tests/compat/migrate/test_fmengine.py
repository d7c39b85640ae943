"""FMEngine's command lines run unchanged with the same results, and its folders can be imported and exported."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import forked
import patience
import pytest
import torch
from fmengine_runs import ds_json, hf_folder, jsonl, same, steps_of_flags, tensors, values
from ports import free_port
from ranks import run_ranks

from shardtrain import cli
from shardtrain.compat import migrate
from shardtrain.compat.migrate import load_flags
from shardtrain.hub_formats.llama_format import HUB

ROOT = Path(__file__).parents[3]
FIRST = """\
deepspeed --num_gpus 4 --num_nodes 1 cli/train.py \\
    --output_dir /workspace/.cache/models \\
    --init_ckpt /pretrained/tinyllama-2-1b \\
    --data_path /datasets/qi/ar/task112_asset_simple_sentence_identification.train.jsonl \\
    --max_seq_len 128 \\
    --train_steps 1000 \\
    --eval_steps 10 \\
    --save_steps 1000 \\
    --log_steps 1 \\
    --pipe_parallel_size 4 \\
    --model_parallel_size 1 \\
    --use_flash_attn true \\
    --use_fused_ops true \\
    --deepspeed_config ./configs/llama.json"""
SECOND = """\
torchrun --nnodes 1 --nproc-per-node 4 --node_rank 0 cli/train.py \\
    --output_dir /workspace/.cache/models \\
    --init_ckpt /pretrained/tinyllama-2-1b-mp2 \\
    --data_path /datasets/qi/ar/task112_asset_simple_sentence_identification.train.jsonl \\
    --max_seq_len 128 \\
    --train_steps 1000 \\
    --eval_steps 10 \\
    --save_steps 1000 \\
    --log_steps 10 \\
    --pipe_parallel_size 2 \\
    --model_parallel_size 2 \\
    --use_flash_attn true \\
    --use_fused_ops true \\
    --deepspeed_config ./configs/llama.json"""
# Derived by hand from FMEngine's rules: 4 ranks in 4 stages, or in 2 stages of 2, are one copy of the model, so a step
# of 32 rows has 4 micro-batches of 8. Adam means AdamW without decay, and the schedule's peak overrides Adam's rate.
SNAPSHOT: dict[str, Any] = {
    "job.dump_folder": "/workspace/.cache/models",
    "model.hf_assets_path": "/pretrained/tinyllama-2-1b",
    "model.flavor": "from_folder",
    "checkpoint.enable": True,
    "checkpoint.initial_load_in_hf": True,
    "checkpoint.interval": 1000,
    "training.dataset": "jsonl",
    "training.dataset_path": "/datasets/qi/ar/task112_asset_simple_sentence_identification.train.jsonl",
    "training.on_data_end": "repeat",
    "data.separator": "\n",
    "data.add_eos": False,
    "training.seq_len": 128,
    "training.steps": 1000,
    "training.local_batch_size": 32,
    "training.global_batch_size": 32,
    "training.mixed_precision_param": "bfloat16",
    "training.mixed_precision_reduce": "float32",
    "training.max_norm": 1.0,
    "metrics.log_freq": 1,
    "parallelism.pipeline_parallel_degree": 4,
    "parallelism.tensor_parallel_degree": 1,
    "parallelism.pipeline_parallel_microbatch_size": 8,
    "launch.nodes": 1,
    "launch.nproc_per_node": 4,
    "optimizer.name": "AdamW",
    "optimizer.lr": 5e-5,
    "optimizer.beta1": 0.9,
    "optimizer.beta2": 0.95,
    "optimizer.eps": 1e-6,
    "optimizer.weight_decay": 0.0,
    "lr_scheduler.name": "deepspeed_warmup",
    "lr_scheduler.warmup_type": "log",
    "lr_scheduler.warmup_steps": 50,
    "lr_scheduler.min_lr_factor": pytest.approx(0.02, rel=1e-12),
    "activation_checkpoint.mode": "full",
    "debug.seed": 3407,
}
CHANGED = {
    "model.hf_assets_path": "/pretrained/tinyllama-2-1b-mp2",
    "metrics.log_freq": 10,
    "parallelism.pipeline_parallel_degree": 2,
    "parallelism.tensor_parallel_degree": 2,
}


@pytest.mark.parametrize(
    ("line", "changed"), [(FIRST, {}), (SECOND, CHANGED)], ids=["deepspeed", "torchrun"]
)
def test_both_command_lines_keep_their_meaning(
    tmp_path: Path, line: str, changed: dict[str, Any]
) -> None:
    ds_json(tmp_path / "configs/llama.json", 8, 32)
    (tmp_path / "run.sh").write_text(line)
    migration = migrate.migrate([tmp_path / "run.sh"])

    assert {setting.option: setting.value for setting in migration.settings} == SNAPSHOT | changed
    assert migration.unsupported == ()


@pytest.mark.parametrize("value", ["true", "True", "yes", "1", ""])
def test_booleans_are_values_or_bare_flags_and_launchers_add_flags(
    tmp_path: Path, value: str
) -> None:
    file = ds_json(tmp_path / "llama.json", 2, 4)
    flags = [
        f"--deepspeed_config={file}",
        "--dry_run",
        *([value] if value else []),
        "--local_rank=1",
    ]
    flags += [
        "--use_flash_attn",
        "no",
        "--use_deepspeed",
        "--project_name",
        "x",
        "--num_workers",
        "3",
    ]
    loaded = load_flags(flags, 1)

    assert loaded.config.checkpoint.load_only
    assert any(
        "num_workers" in notice and "FMEngine ignores it" in notice for notice in loaded.notices
    )


def test_ranks_beyond_the_stages_are_replicas(tmp_path: Path) -> None:
    """Without ZeRO, each replica holds its full stages, and the replicas divide the batch."""
    file = ds_json(tmp_path / "llama.json", 2, 8)
    flags = f"--deepspeed_config {file} --init_ckpt nowhere --pipe_parallel_size 2 --data_path d.jsonl".split()
    for count, copies in ((2, 1), (4, 2), (8, 4)):
        run_config = load_flags(flags, count, follow=False).config
        assert run_config.parallelism.data_parallel_replicate_degree == copies
        assert (run_config.training.local_batch_size, run_config.training.global_batch_size) == (
            8 // copies,
            8,
        )
    script = tmp_path / "run.sh"
    script.write_text("deepspeed --num_gpus 4 --num_nodes 2 cli/train.py " + " ".join(flags))
    settings = {setting.option: setting.value for setting in migrate.migrate([script]).settings}

    assert settings["parallelism.data_parallel_replicate_degree"] == 4


def test_rates_and_twenty_steps_match_a_plain_loop(tmp_path: Path) -> None:
    """Compare with a plain loop: mean over micro-batches, clipping, Adam without decay, logarithmic warmup.

    The loop does not imitate FMEngine's faults: replicas that read the same rows, bfloat16 regardless of
    the JSON, and EOS that is not a target. Both train in float32, so only the summation order differs.
    """
    warmup = 10
    least = 1e-4
    most = 5e-3
    micro = 2
    length = 16
    steps = 20
    schedule = {"warmup_min_lr": least, "warmup_max_lr": most, "warmup_num_steps": warmup}
    file = ds_json(
        tmp_path / "llama.json",
        micro,
        4,
        bf16=False,
        scheduler={"type": "WarmupLR", "params": schedule},
    )
    folder = hf_folder(tmp_path / "hf")
    data = jsonl(tmp_path / "data.jsonl")
    arguments = ["checkpoint", "to-fmengine", str(folder), str(tmp_path / "mp2")]
    assert cli.main([*arguments, "--mp_world_size", "2"]) == 0

    # Train the folder on two pipeline stages.
    flags = f"--init_ckpt {tmp_path}/mp2 --data_path {data} --max_seq_len {length} --train_steps {steps} "
    flags += f"--pipe_parallel_size 2 --deepspeed_config {file} --output_dir {tmp_path}/out"
    stages = run_ranks(2, steps_of_flags, flags.split(), steps)
    _, _, _, weights = stages[0]
    losses, rates, rows, weights_of_last_stage = stages[1]
    weights = weights | weights_of_last_stage

    import transformers
    from tokenizers import Tokenizer

    # Each row is a window of all texts, which are joined by line breaks.
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens_of_all_texts = []
    for line in data.read_text().splitlines():
        tokens_of_all_texts += tokenizer.encode(json.loads(line)["text"]).ids
        tokens_of_all_texts += tokenizer.encode("\n").ids
    windows = set()
    for start in range(0, len(tokens_of_all_texts) - length, length):
        windows.add(tuple(tokens_of_all_texts[start : start + length + 1]))

    # The same steps in a plain loop
    model = transformers.LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    parameters = dict(model.named_parameters())
    moments = {name: [torch.zeros_like(p), torch.zeros_like(p)] for name, p in parameters.items()}
    for step in range(steps):
        tokens, targets = rows[step]
        assert len(tokens) == 4
        for row, last in zip(tokens.tolist(), targets[:, -1].tolist(), strict=True):
            window = (*row, last)
            if -100 not in row and last >= 0:
                assert window in windows

        total = 0.0
        parts = list(zip(tokens.split(micro), targets.split(micro), strict=True))
        for inputs, labels in parts:
            logits = model(inputs).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            loss = loss / len(parts)
            loss.backward()
            total += loss.item()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters.values()))
        scale = min(1.0, 1.0 / (norm + 1e-6))
        rate = least + (most - least) * min(1.0, math.log(step + 1) / math.log(warmup))
        assert rates[step] == pytest.approx(rate, rel=1e-12)
        assert losses[step] == pytest.approx(total, rel=1e-6)

        # Adam
        with torch.no_grad():
            for name, p in parameters.items():
                first, second = moments[name]
                gradient = p.grad * scale
                first.mul_(0.9).add_(gradient, alpha=0.1)
                second.mul_(0.95).addcmul_(gradient, gradient, value=0.05)
                corrected = (second / (1 - 0.95 ** (step + 1))).sqrt().add_(1e-6)
                p.addcdiv_(first / (1 - 0.9 ** (step + 1)), corrected, value=-rate)
                p.grad = None

    for name, weight in weights.items():
        expected = parameters[str(HUB.source(name))].detach()
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)


def program(folder: Path, name: str, arguments: str) -> subprocess.CompletedProcess[str]:
    """Run one of FMEngine's programs in a folder with only the files that a user has."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardtrain.compat.fmengine", name, *arguments.split()]
    limit = patience.seconds(150)
    result = forked.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result


TRAIN = (
    "--num_gpus 2 --num_nodes 1 cli/train.py --output_dir ./output --init_ckpt ./pretrained --data_path ./data.jsonl "
    "--max_seq_len 32 --train_steps 3 --eval_steps 100 --save_steps 2 --log_steps 1 --pipe_parallel_size 2 "
    "--model_parallel_size 1 --use_flash_attn true --use_fused_ops true --deepspeed_config ./configs/llama.json"
)


def users_folder(folder: Path) -> Path:
    hf_folder(folder / "hf")
    jsonl(folder / "data.jsonl")
    ds_json(folder / "configs/llama.json", 1, 4)
    lora = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0}
    ds_json(folder / "configs/llama_lora.json", 1, 4, lora=lora)
    return folder


def test_a_user_s_folder_trains_and_converts_back_in_three_commands(tmp_path: Path) -> None:
    folder = users_folder(tmp_path)
    program(folder, "from_hf", "--model_name_or_path hf --output_dir pretrained --mp_world_size 2")
    program(folder, "deepspeed", TRAIN)
    program(
        folder,
        "to_hf_format",
        "--in-model-path output --out-model-path out --base-model hf --step latest",
    )
    steps = values(folder / "output")

    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["lr"] for step in steps] == pytest.approx(
        [1e-6 + 4.9e-5 * math.log(t + 1) / math.log(50) for t in range(3)], rel=1e-12
    )

    before = tensors(folder / "hf")
    after = tensors(folder / "out")
    assert before.keys() == after.keys()

    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(before)

    # The trained weights survive a bitwise round trip through per-layer files.
    newest = str(folder / "output/checkpoint/step-3")
    assert (
        cli.main(["checkpoint", "to-fmengine", newest, str(folder / "layers"), "--mp_world_size=2"])
        == 0
    )
    assert (
        cli.main(
            ["export", str(folder / "layers"), "--to", str(folder / "again"), "--check=weights"]
        )
        == 0
    )

    same(tensors(folder / "again"), after)


def test_a_lora_block_trains_only_adapters(tmp_path: Path) -> None:
    folder = users_folder(tmp_path)
    program(folder, "from_hf", "--model_name_or_path hf --output_dir pretrained")
    program(folder, "deepspeed", TRAIN.replace("llama.json", "llama_lora.json"))
    arguments = (
        "--in-model-path output --out-model-path adapter --base-model hf --step global_step3"
    )
    program(folder, "to_hf_format", arguments)
    from safetensors.torch import load_file

    adapters = load_file(str(folder / "adapter/adapter_model.safetensors"))
    assert {name.split(".")[-3] for name in adapters} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert all(".lora_" in name for name in adapters)
    assert len(adapters) == 2 * 4 * 2
    # lora_B starts at zero, so a value other than zero was trained.
    assert any(bool(tensor.any()) for name, tensor in adapters.items() if "lora_B" in name)

    fields = json.loads((folder / "adapter/adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"]) == (4, 8)
    assert fields["base_model_name_or_path"] == "hf"


def test_adapters_of_a_mistral_are_on_queries_and_values(tmp_path: Path) -> None:
    hf_folder(tmp_path / "hf", "mistral")
    file = ds_json(
        tmp_path / "mistral_lora.json", 1, 4, lora={"r": 4, "lora_alpha": 16, "lora_dropout": 0.1}
    )
    flags = f"--init_ckpt {tmp_path}/hf --deepspeed_config {file} --data_path d.jsonl"

    assert load_flags(flags.split(), 1).config.lora.target_modules == ["q_proj", "v_proj"]


@pytest.mark.nightly(
    "the same in separate processes",
    by="tests/compat/migrate/test_fmengine.py::test_a_user_s_folder_trains_and_converts_back_in_three_commands",
)
def test_shell_commands_and_a_slurm_script_run_unchanged(tmp_path: Path) -> None:
    """Both launchers are found on PATH, and the site's script runs with stubs of Slurm and Apptainer."""
    folder = users_folder(tmp_path)
    for name, text in SHIMS.items():
        (folder / "site").mkdir(exist_ok=True)
        (folder / "site" / name).write_text(text)
        (folder / "site" / name).chmod(0o755)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RECORD": str(folder / "record"),
        "SLURM_JOB_GPUS": "0",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "two",
    }
    environment["PATH"] = f"{folder}/site:{environment['PATH']}"
    python = shlex.quote(sys.executable)
    ours = f'export PATH="$({python} -m shardtrain.compat.fmengine commands ./bin):$PATH"'

    def shell(text: str) -> None:
        result = subprocess.run(
            ["bash", "-c", text], cwd=folder, env=environment, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr[-3000:]

    # deepspeed
    program(folder, "from_hf", "--model_name_or_path hf --output_dir pretrained --mp_world_size 1")
    shell(f"{ours}\ndeepspeed {TRAIN}")
    by_deepspeed = [step["loss"] for step in values(folder / "output")]
    assert len(by_deepspeed) == 3

    # torchrun
    flags = TRAIN.partition("cli/train.py ")[2].replace("./output", "./second")
    shell(f"{ours}\ntorchrun --nnodes 1 --nproc-per-node 2 --node_rank 0 cli/train.py {flags}")
    assert [step["loss"] for step in values(folder / "second")] == by_deepspeed

    # The script of the site, with tensor instead of pipeline parallelism. The stub of Apptainer has no mounts,
    # only its working folder.
    flags = flags.replace("./second", "./third")
    flags = flags.replace("--pipe_parallel_size 2", "--pipe_parallel_size 1")
    flags = flags.replace("--model_parallel_size 1", "--model_parallel_size 2")
    shell(f"{ours}\n{SCRIPT.replace('PORT', str(free_port())).replace('FLAGS', flags)}")
    by_script = [step["loss"] for step in values(folder / "third")]
    # Tensor parallelism sums bfloat16 values in another order.
    assert by_script == pytest.approx(by_deepspeed, rel=2e-3)

    record = [line.split() for line in (folder / "record").read_text().splitlines()]
    assert [command[command.index("--node_rank") + 1] for command in record] == ["0", "1"]
    for command in record:
        assert command[0] == "run"
        assert "--nv" in command
        assert f"{folder}:/workspace" in command
        assert command[command.index("--nnodes") + 1] == "2"
        assert "--nproc-per-node=1" in command


SHIMS = {
    "scontrol": "#!/bin/sh\necho localhost\necho localhost\n",
    "srun": '#!/bin/bash\nwhile [ "$1" != singularity ]; do shift; done\nexec "$@"\n',
    "singularity": """\
#!/bin/bash
exec 9>>"$RECORD"
flock 9
echo "$@" >&9
flock -u 9
while [ "${1##*.}" != sif ]; do shift; done
shift
exec "$@"
""",
}
SCRIPT = """\
IFS=',' read -ra GPU_ARRAY <<< "$SLURM_JOB_GPUS"
NUM_GPUS=${#GPU_ARRAY[@]}
export MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
export COUNT_NODE=`scontrol show hostnames "$SLURM_JOB_NODELIST" | wc -l`
for ((i=0; i<$COUNT_NODE; i++))
do
    srun --nodes=1 --ntasks=1 -w "$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n "$((i+1))p")" \
    singularity run --nv --bind $PWD/cache:/.hf_cache --env HF_HOME=/.hf_cache --env PYTHONPATH=/workspace \
    --bind $PWD:/workspace --pwd /workspace fmsys_0.0.4.sif \
    torchrun --master_addr "$MASTER_ADDR" --master_port PORT --node_rank $i --nnodes $SLURM_NTASKS \
    --nproc-per-node=$NUM_GPUS cli/train.py FLAGS || echo failed >> "$RECORD" &
    sleep 1
done
wait
"""


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max_seq_length 3", "max_seq_length"),
        ("--max_seq_len many", "max_seq_len"),
        ("--max_seq_len", "max_seq_len"),
        ("--dry_run maybe", "dry_run"),
        ("--use_deepspeed false", "use_deepspeed"),
        ("surplus", "surplus"),
        ("--seed 1 2", "2"),
        ("--pipe_parallel_size 3", "pipe_parallel_size"),
        ("--training.no_such 3", "training.no_such"),
        ("--init_ckpt=none_here", "none_here"),
    ],
)
def test_a_wrong_flag_is_one_line_before_ranks_start(
    tmp_path: Path, flags: str, message: str, capfd: Any
) -> None:
    file = ds_json(tmp_path / "llama.json", 1, 4)
    arguments = ["train", "--nproc", "2", f"--deepspeed_config={file}", *flags.split()]
    assert cli.main(arguments) == 2

    error = capfd.readouterr().err.strip().splitlines()
    assert len(error) == 1 and message in error[0], error


def test_a_file_of_another_system_is_not_mistaken_for_deepspeed(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "args.json").write_text(
        '{"per_device_train_batch_size": 2, "output_dir": "x", "learning_rate": 1.0}'
    )
    (tmp_path / "run.toml").write_text("[training]\nsteps = 3\n")
    for name, message in (
        ("args.json", "Hugging Face TrainingArguments"),
        ("run.toml", "run.toml:"),
        ("no", "does not exist here"),
    ):
        assert cli.main(["train", f"--deepspeed_config={tmp_path / name}"]) == 2
        error = capfd.readouterr().err.strip().splitlines()
        assert len(error) == 1 and message in error[0], error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--max_seq_len", "3"], "--deepspeed_config"),
        (["deepspeed", "other.py"], "other.py"),
        (["deepspeed", "--num_gpus"], "--num_gpus"),
        (["deepspeed", "--num_gpus", "0", "cli/train.py", "--deepspeed_config=x"], "--num_gpus"),
        (["deepspeed", "--elastic_training", "cli/train.py"], "--elastic_training"),
        (["deepspeed", "--num_nodes", "2", "cli/train.py"], "hostfile"),
        (["deepspeed", "--hostfile", "missing", "cli/train.py"], "missing"),
        (["train.py"], "train.py"),
        (["commands"], "folder"),
        (
            ["to_hf_format", "--in-model-path=x", "--out-model-path=y", "--base-model=org/name"],
            "org/name",
        ),
        (["to_hf_format", "--in-model-path=x", "--out-model-path=y"], "layer_00-model_00"),
        (["from_hf", "--model_name_or_path=org/name", "--output_dir=y"], "org/name"),
    ],
)
def test_a_wrong_argument_of_its_programs_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capfd: Any
) -> None:
    from shardtrain.compat.fmengine.__main__ import main

    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        code = main(arguments)
    finally:
        os.chdir(before)
    error = capfd.readouterr().err

    assert code in (2, 5)
    assert len(error.strip().splitlines()) == 1
    assert message in error
    assert list(tmp_path.iterdir()) == []


SSH = """\
#!/bin/bash
# stub of ssh: runs the command of the remote host locally
for word in "$@"; do [ "$word" = -G ] && { echo "hostname ${@: -1}"; exit 0; }; done
echo "$@" >> "$RECORD"
while [ "$1" != -- ]; do shift; done
export SSH_CONNECTION="127.0.0.1 1 127.0.0.$([ "$2" = host-a ] && echo 1 || echo 2) 22"
exec bash -c "$3"
"""


@pytest.mark.nightly(
    "the commands for the hosts",
    by="tests/compat/migrate/test_fmengine.py::test_a_hostfile_becomes_a_launch_by_ssh",
)
def test_hosts_of_a_hostfile_train_one_run(tmp_path: Path) -> None:
    folder = users_folder(tmp_path)
    (folder / "site").mkdir()
    (folder / "site/ssh").write_text(SSH)
    (folder / "site/ssh").chmod(0o755)
    # The hostfile has three hosts, and the command requests two.
    (folder / "hostfile").write_text("host-a slots=2\nhost-b slots=2\nhost-c slots=2\n")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "RECORD": str(folder / "record"),
    }
    environment |= {
        "PATH": f"{folder}/site:{os.environ['PATH']}",
        "XDG_STATE_HOME": str(folder / "state"),
    }
    program(folder, "from_hf", "--model_name_or_path hf --output_dir pretrained")
    arguments = TRAIN.replace(
        "--num_gpus 2 --num_nodes 1", f"--num_gpus 1 --num_nodes 2 --master_port {free_port()}"
    )
    command = [
        sys.executable,
        "-m",
        "shardtrain.compat.fmengine",
        "deepspeed",
        "--hostfile",
        "hostfile",
        *arguments.split(),
    ]
    limit = patience.seconds(150)
    result = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit
    )

    assert result.returncode == 0, result.stderr[-3000:]
    assert [step["step"] for step in values(folder / "output")] == [1, 2, 3]

    record = (folder / "record").read_text()
    assert "host-a" in record
    assert "host-b" in record
    assert "host-c" not in record


def test_a_hostfile_becomes_a_launch_by_ssh(tmp_path: Path, monkeypatch: Any) -> None:
    """Check only how the launcher's options are translated. Other tests cover the launch itself."""
    from shardtrain.compat.fmengine import launching
    from shardtrain.launch import launch_command

    folder = users_folder(tmp_path)
    monkeypatch.chdir(folder)
    Path("hostfile").write_text("node1 slots=4\nnode2 slots=4\nnode3 slots=4\n")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    calls: list[list[str]] = []

    def record_call(arguments: list[str]) -> int:
        calls.append(arguments)
        return 0

    monkeypatch.setattr(launch_command, "main", record_call)
    flags = "cli/train.py --init_ckpt hf --data_path data.jsonl --output_dir out --deepspeed_config configs/llama.json"
    two_of_each = "--include node1:0,1@node3:0,1 --master_port 3000"
    translations = {
        "--exclude node2": "--exclude node2",
        two_of_each: two_of_each,
        "--num_nodes 2 --num_gpus 2 --master_addr n1": "--nodes 2 --master_addr n1 --include node1:0,1@node2:0,1",
        "--num_gpus 4": "--nproc 4",
    }
    for options, expected in translations.items():
        assert launching.deepspeed(f"--hostfile hostfile {options} {flags}".split()) == 0
        arguments = calls.pop()
        assert arguments[:4] == ["ssh", str(folder / "out/fmengine.toml"), "--hostfile", "hostfile"]
        workdir = arguments.index("--launch.workdir")
        assert " ".join(arguments[4:workdir]) == expected
        assert arguments[workdir + 1] == str(folder)
        assert "NCCL_DEBUG" in arguments[arguments.index("--launch.forward_env") :]

    # With a single host, training runs in this process instead of through ssh.
    monkeypatch.setattr(launching, "train", record_call)
    assert launching.deepspeed(f"--hostfile hostfile --include node2 {flags}".split()) == 0
    assert calls.pop() == ["--nproc", "4", *flags.split()[1:]]

    settings = (folder / "out/fmengine.toml").read_text()
    assert 'hf_assets_path = "hf"' in settings
    assert 'flavor = "from_folder"' in settings


@pytest.mark.parametrize("family", ["llama2", "mistral"])
def test_the_window_size_flag_overrides_that_of_the_folder(family: str, tmp_path: Path) -> None:
    """The loss of the first step equals that of transformers with a mask of 4 tokens."""
    folder = hf_folder(tmp_path / "hf", family)
    data = jsonl(tmp_path / "data.jsonl")
    file = ds_json(tmp_path / "llama.json", 4, 4, bf16=False)
    flags = f"--init_ckpt {folder} --data_path {data} --max_seq_len 32 --deepspeed_config {file}"
    flags += f" --output_dir {tmp_path}/out"
    losses, _, _, _ = run_ranks(1, steps_of_flags, [*flags.split(), "--window_size", "4"], 2)[0]
    _, _, rows, _ = run_ranks(1, steps_of_flags, flags.split(), 1)[0]
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    # The mask lets each token see itself and the three tokens before it.
    tokens, targets = rows[0]
    distance = torch.arange(32)[:, None] - torch.arange(32)[None, :]
    is_visible = (distance >= 0) & (distance < 4)
    mask = torch.where(is_visible, 0.0, float("-inf")).expand(len(tokens), 1, 32, 32)
    logits = model(tokens, attention_mask=mask).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    assert losses[0] == pytest.approx(loss.item(), rel=1e-5)
