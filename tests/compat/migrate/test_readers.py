"""Configuration files of other systems: every key has an answer, and the TOML trains with the same numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign_configs import FILES, LLAMA, write

from shardtrain import cli, config
from shardtrain.compat.migrate import load, migrate
from shardtrain.compat.migrate.foreign_files import Migration
from shardtrain.optim.lr_scheduler import learning_rate
from shardtrain.utils.errors import ConfigError

ROOT = Path(__file__).parents[3]


def of(migration: Migration, *options: str) -> list[Any]:
    values = {setting.option: setting.value for setting in migration.settings}
    return [values.get(option) for option in options]


def migration_of(
    folder: Path, name: str, text: str | dict[str, Any], processes: int | None = None
) -> Migration:
    file = folder / name
    file.write_text(text if isinstance(text, str) else json.dumps(text, indent=1))
    return migrate([file], processes)


def leaves(values: Any, start: str = "") -> set[str]:
    """Return the dotted names of all keys whose values are not tables."""
    keys = set()
    for key, value in values.items():
        name = f"{start}{key}"
        if isinstance(value, dict) and value:
            keys |= leaves(value, f"{name}.")
        else:
            keys.add(name)
    return keys


@pytest.mark.parametrize("name", FILES)
def test_every_key_has_one_answer_with_its_line(tmp_path, name):
    file = write(tmp_path, name)
    migration = migrate([file])
    keys = [entry.key for entry in migration.entries if entry.verdict != "default"]

    assert len(keys) == len(set(keys))

    defaults = [entry.option for entry in migration.entries if entry.verdict == "default"]
    others = {entry.option for entry in migration.entries if entry.verdict != "default"}
    assert len(defaults) == len(set(defaults))
    assert not others & set(defaults)

    lines = file.read_text().splitlines()
    for entry in migration.entries:
        if entry.verdict == "default":
            continue
        number = int(entry.where.rpartition(":")[2])
        assert entry.key.rpartition(".")[2] in lines[number - 1]
        assert entry.text
    # A JSON table may be answered as a whole: one entry then covers all keys in it.
    if file.suffix == ".json":
        answered = set(keys)
        for leaf in leaves(json.loads(file.read_text())):
            assert any(leaf == key or leaf.startswith(f"{key}.") for key in answered), leaf


@pytest.mark.parametrize("name", FILES)
def test_the_toml_has_the_same_settings_and_migrate_is_idempotent(tmp_path, name):
    file = write(tmp_path, name)
    first = config.load_settings(migrate([file]).settings, path=file, follow=False)
    text = config.set_toml(first)
    toml = tmp_path / "new.toml"
    toml.write_text(text)
    again = config.load_settings(migrate([toml]).settings, path=toml, follow=False)

    assert again.config == first.config
    assert config.set_toml(again) == text
    assert again.notices == ()


FOLDER = ("model.flavor", "model.hf_assets_path", "lora.enable")


@pytest.mark.parametrize("name", [name for name in FILES if not name.startswith("axolotl")])
def test_a_migrated_configuration_passes_the_check(tmp_path, name):
    """Ignore problems with the model folder, which does not exist in the tests."""
    file = write(tmp_path, name)
    loaded = config.load_settings(migrate([file]).settings, path=file, follow=False)
    assert [str(p) for p in config.check(loaded) if p.option not in FOLDER] == []


# Expected values of each FMEngine preset: micro-batch, batch, precision, peak, first rate, warmup, beta2, eps, lora
PRESETS = {
    "llama": ({}, (8, 32, "bfloat16", 5e-5, 1e-6, 50, 0.95, 1e-6, None)),
    "llama_lessmem": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "scheduler": {"warmup_max_lr": 1e-5},
            "activation_checkpointing": {"partition_activations": True},
        },
        (1, 32, "bfloat16", 1e-5, 1e-6, 50, 0.95, 1e-6, None),
    ),
    "llama_lora": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "train_batch_size": 8,
            "lora": {"r": 32, "lora_alpha": 1, "lora_dropout": 0.0},
        },
        (1, 8, "bfloat16", 5e-5, 1e-6, 50, 0.95, 1e-6, (32, 1.0, 0.0)),
    ),
    "llama_lora_ulysses": (
        {"lora": {"r": 8, "lora_alpha": 0.5, "lora_dropout": 0}},
        (8, 32, "bfloat16", 5e-5, 1e-6, 50, 0.95, 1e-6, (8, 0.5, 0.0)),
    ),
    "mistral_lora": (
        {
            "train_micro_batch_size_per_gpu": 4,
            "autotuning": {"enabled": True, "metric": "throughput", "arg_mappings": None},
            "lora": {"r": 32, "lora_alpha": 16, "lora_dropout": 0.1},
        },
        (4, 32, "bfloat16", 5e-5, 1e-6, 50, 0.95, 1e-6, (32, 16.0, 0.1)),
    ),
    "pythia": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": False},
            "fp16": {
                "enabled": True,
                "loss_scale": 0,
                "loss_scale_window": 1000,
                "initial_scale_power": 12,
                "hysteresis": 2,
                "min_loss_scale": 1,
            },
            "precision": None,
            "optimizer": {"lr": 1e-6, "eps": 1e-8},
            "scheduler": {"warmup_min_lr": 0, "warmup_max_lr": 0.001},
        },
        (1, 32, "float16", 1e-3, 0.0, 50, 0.95, 1e-8, None),
    ),
    "7b": (
        {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": False},
            "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12},
            "precision": None,
            "offload_optimizer": {"device": "cpu", "nvme_path": "/scratch", "pin_memory": True},
            "optimizer": {"lr": 5e-6, "eps": 1e-8},
            "scheduler": None,
            "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
        },
        (1, 32, "float16", 5e-6, 5e-6, 0, 0.95, 1e-8, None),
    ),
}


def preset(changes: dict[str, Any]) -> dict[str, Any]:
    config = json.loads(json.dumps(LLAMA))
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        elif key in ("optimizer", "scheduler"):
            config[key]["params"] |= value
        elif isinstance(value, dict):
            config[key] = {**config.get(key, {}), **value}
        else:
            config[key] = value
    return config


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_fmengine_keep_their_meaning(tmp_path, name):
    changes, expected = PRESETS[name]
    migration = migration_of(tmp_path, f"{name}.json", preset(changes))
    c = config.load_settings(migration.settings).config
    first = learning_rate(c.optimizer, c.lr_scheduler, 1000, 0)
    lora = (c.lora.rank, c.lora.alpha, c.lora.dropout) if c.lora.enable else None

    assert (
        c.training.local_batch_size,
        c.training.global_batch_size,
        c.training.mixed_precision_param,
        c.optimizer.lr,
        pytest.approx(first, rel=1e-12),
        c.lr_scheduler.warmup_steps,
        c.optimizer.beta2,
        c.optimizer.eps,
        lora,
    ) == expected
    assert (c.optimizer.name, c.optimizer.weight_decay, c.training.max_norm) == ("AdamW", 0.0, 1.0)
    assert c.activation_checkpoint.mode == "full"
    assert c.activation_checkpoint.cpu_offload == (name == "7b")
    assert not c.training.enable_cpu_offload  # DeepSpeed ignores cpu_offload at the top level
    if c.training.mixed_precision_param == "float16":
        assert c.training.initial_loss_scale == 4096.0
        assert c.training.loss_scale_growth_interval == 1000

    # FMEngine does not read these keys.
    ignored = {entry.key for entry in migration.entries if entry.verdict == "ignored"}
    assert ignored >= {"lr-decay-style", "warmup", "min_lr"}


def test_rates_of_a_preset_match_the_closed_form_at_every_step(tmp_path):
    import math

    c = config.load_settings(migration_of(tmp_path, "llama.json", LLAMA).settings).config
    for step in range(100):
        form = 1e-6 + (5e-5 - 1e-6) * math.log(step + 1) / math.log(50) if step < 50 else 5e-5
        assert learning_rate(c.optimizer, c.lr_scheduler, 1000, step) == pytest.approx(
            form, rel=1e-12
        )


SCHEDULES = [
    (
        {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 1e-6, "warmup_num_steps": 7, "total_num_steps": 30},
        },
        ["deepspeed_warmup_decay", 7, "log", 1e-3, 30, 1e-3],
    ),
    (
        {
            "type": "WarmupCosineLR",
            "params": {"warmup_type": "linear", "total_num_steps": 30, "cos_min_ratio": 0.1},
        },
        ["deepspeed_warmup_cosine", 1000, "linear", 1e-5, 30, 0.1],
    ),
    (
        {
            "type": "WarmupDecayLR",
            "params": {
                **dict.fromkeys(["warmup_min_lr", "warmup_max_lr", "total_num_steps"], "auto"),
                "warmup_num_steps": 7,
            },
        },
        ["deepspeed_warmup_decay", 7, "log", 1e-5, None, 0.0],
    ),
]


@pytest.mark.parametrize(("scheduler", "expected"), SCHEDULES)
def test_schedules_of_deepspeed_that_end_are_followed(tmp_path, scheduler, expected):
    migration = migration_of(tmp_path, "ds.json", {**LLAMA, "scheduler": scheduler})
    names = ["name", "warmup_steps", "warmup_type", "lr", "total_steps", "min_lr_factor"]
    options = [f"{'optimizer' if name == 'lr' else 'lr_scheduler'}.{name}" for name in names]

    assert of(migration, *options) == expected
    assert not migration.unsupported
    assert config.check(config.load_settings(migration.settings)) == []


WRONG_NUMBERS: dict[str, tuple[dict[str, Any], str]] = {
    "three batch sizes that disagree": (
        {"gradient_accumulation_steps": 3},
        "train_batch_size=32 must be 8 x 3 x the",
    ),
    "no end": (
        {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
        "total_num_steps must be a positive number of steps",
    ),
    "a first rate above the peak": (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1}}},
        "warmup_min_lr=1.0 is above warmup_max_lr=0.001",
    ),
}


@pytest.mark.parametrize("name", WRONG_NUMBERS)
def test_numbers_rejected_by_deepspeed_are_rejected(tmp_path, name):
    changed, message = WRONG_NUMBERS[name]
    with pytest.raises(ConfigError, match=message):
        migration_of(tmp_path, "ds.json", {**LLAMA, **changed})


def test_unsupported_schedule_keys_are_reported(tmp_path):
    cosine = {
        "type": "WarmupCosineLR",
        "params": {"total_num_steps": 9, "warmup_max_lr": 1e-3, "warmup_min_ratio": 0.5},
    }
    migration = migration_of(tmp_path, "ds.json", {**LLAMA, "scheduler": cosine})
    reasons = {entry.key.rpartition(".")[2]: entry.text for entry in migration.unsupported}

    assert reasons.keys() == {"warmup_max_lr", "warmup_min_ratio"}
    assert "starts at 0" in reasons["warmup_min_ratio"]


TABLES = [key for key, value in LLAMA.items() if isinstance(value, dict)]


@pytest.mark.parametrize("key", TABLES)
def test_a_table_may_be_empty_but_must_be_a_table(tmp_path, key):
    for empty in ({}, None):
        migration = migration_of(tmp_path, "ds.json", {**LLAMA, key: empty})
        assert any(
            entry.key == key or entry.key.startswith(f"{key}.") for entry in migration.entries
        )
    if key != "activation_checkpointing":  # enables recomputation, whatever its value
        with pytest.raises(ConfigError, match=rf"{key}=3 must be a table; write {key} as a table"):
            migration_of(tmp_path, "ds.json", {**LLAMA, key: 3})


def without_each(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return copies of the values, each without one key or one key of a table."""
    variants = []
    for key, value in values.items():
        variants.append({other: item for other, item in values.items() if other != key})
        if isinstance(value, dict):
            variants += [{**values, key: inner} for inner in without_each(value)]
    return variants


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith((".toml", ".sh"))])
def test_every_key_has_an_answer_if_another_is_missing(tmp_path, name):
    text = FILES[name]
    values = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    for number, fewer in enumerate(without_each(values)):
        try:
            migration = migration_of(tmp_path, f"{number}.json", fewer, 2)
        except ConfigError:
            continue
        keys = {entry.key for entry in migration.entries}
        for leaf in leaves(fewer):
            is_answered = leaf in keys or any(leaf.startswith(f"{key}.") for key in keys)
            assert is_answered, (leaf, fewer)


def test_an_enabled_precision_overrides_an_auto_one(tmp_path):
    values = {**LLAMA, "bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}
    assert of(migration_of(tmp_path, "ds.json", values), "training.mixed_precision_param") == [
        "float16"
    ]


@pytest.mark.parametrize(
    ("kind", "reduce"),
    [("fp32", "float32"), ("fp16", "float32"), ("float16", "float32"), ("bf16", "bfloat16")],
)
def test_each_dtype_of_gradient_accumulation_is_accepted(tmp_path, kind, reduce):
    migration = migration_of(
        tmp_path, "ds.json", {**LLAMA, "data_types": {"grad_accum_dtype": kind}}
    )
    assert of(migration, "training.mixed_precision_reduce") == [reduce]


def test_flags_of_fmengine_are_combined_with_its_json(tmp_path):
    json_file = tmp_path / "llama.json"
    json_file.write_text(json.dumps(LLAMA))
    flags = (
        "--num_gpus 4 --num_nodes 1 cli/train.py --output_dir out --init_ckpt ./llama --data_path ./data.jsonl "
        "--max_seq_len 512 --train_steps 1000 --eval_steps 100 --save_steps 500 --log_steps 10 --pipe_parallel_size 2 "
        "--model_parallel_size 1 --use_flash_attn true --use_fused_ops false --deepspeed_config llama.json"
    )
    script = tmp_path / "run.sh"
    script.write_text("set -e\n\ndeepspeed " + flags.replace(" --", " \\\n  --") + "\n")
    with_json = migrate([script, json_file])

    training = ("job.dump_folder", "training.seq_len", "training.steps", "metrics.log_freq")
    assert of(with_json, *training) == ["out", 512, 1000, 10]
    assert of(with_json, "parallelism.pipeline_parallel_degree", "launch.nproc_per_node") == [2, 4]
    # 2 copies of 2 stages: 16 rows each, in micro-batches of 8.
    assert of(with_json, "training.local_batch_size", "training.global_batch_size") == [16, 32]
    microbatch_and_seed = ("parallelism.pipeline_parallel_microbatch_size", "debug.seed")
    assert of(with_json, *microbatch_and_seed) == [8, 3407]

    (entry, *_) = [entry for entry in with_json.entries if entry.key == "max_seq_len"]
    assert entry.where == "run.sh:8"

    # The script alone, or the JSON file with the script's flags, give the same values.
    def values_of(migration):
        return {setting.option: setting.value for setting in migration.settings}

    assert values_of(migrate([script])) == values_of(with_json)
    from_flags = migrate([json_file], flags=["deepspeed", *flags.split()])
    assert values_of(from_flags) == values_of(with_json)


def test_parameters_yml_keeps_its_meaning(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    data = tmp_path / "pytorch_universal_trainer" / "data"
    data.mkdir(parents=True)
    (data / "sentiment-train").write_text("good\t1\n" * 512)
    file = write(tmp_path, "parameters.yml")
    migration = migrate([file])
    c = config.load_settings(migration.settings, follow=False).config

    assert (c.model.name, c.model.overrides["num_labels"]) == ("transformers", 2)
    assert "~" not in c.job.dump_folder
    assert c.job.dump_folder.startswith(str(tmp_path))
    assert (c.task.name, c.task.num_labels) == ("classification", 2)
    assert (c.data.text_field, c.task.label_field) == ("0", "1")
    assert c.training.local_batch_size == 32
    assert c.training.global_batch_size == 64 * 2
    assert c.training.epochs == 3
    assert (c.optimizer.lr, c.optimizer.beta2, c.optimizer.weight_decay) == (2e-5, 0.999, 0.01)
    assert (c.lr_scheduler.name, c.lr_scheduler.warmup_proportion) == ("linear_by_proportion", 0.01)
    assert (c.training.mixed_precision_param, c.training.seq_len) == ("float16", 1024)
    assert c.parallelism.data_parallel_replicate_degree == 2
    assert c.parallelism.data_parallel_shard_degree == 1
    assert (c.validation.per_epoch, c.checkpoint.keep_best) == (1, "validation.accuracy")
    # 512 rows in steps of 32 x 2 x 2: 4 steps per epoch.
    assert (c.metrics.log_freq, c.checkpoint.interval) == (2, 4)


SHARDING = {
    "optimizer_sharding": ({"shard_optimizer_states": True, "data_parallel_replicate_degree": 2}),
    "model_sharding": (
        {"fsdp_reshard_after_forward": "never", "data_parallel_replicate_degree": 1}
    ),
    "both": ({"fsdp_reshard_after_forward": "always", "data_parallel_shard_degree": -1}),
}


@pytest.mark.parametrize("name", SHARDING)
def test_sharding_flags_of_fairscale_are_followed(tmp_path, name):
    text = FILES["parameters.yml"]
    flags = ["model_sharding", "reshard_forward"] if name == "both" else [name]
    for flag in flags:
        text = text.replace(f"use_fairscale_{flag}: False", f"use_fairscale_{flag}: True")
    parallelism = config.load_settings(
        migration_of(tmp_path, "parameters.yml", text).settings, follow=False
    ).config.parallelism

    assert {key: getattr(parallelism, key) for key in SHARDING[name]} == SHARDING[name]


def test_a_global_batch_is_divided_over_one_process_per_device(tmp_path):
    text = FILES["parameters.yml"].replace("is_distributed: True", "is_distributed: False")
    migration = migration_of(tmp_path, "parameters.yml", text, 4)
    assert of(migration, "training.local_batch_size", "training.global_batch_size") == [4, 32]


def test_a_custom_key_requires_a_task_file(tmp_path):
    text = FILES["parameters.yml"].replace(
        "    num_labels: 2", "    num_labels: 2\n    margin: 0.3"
    )
    migration = migration_of(tmp_path, "parameters.yml", text)
    (entry,) = migration.unsupported

    assert entry.key == "transformers-params.margin"
    assert "task.options" in entry.text


def test_accumulation_needs_the_number_of_processes(tmp_path):
    file = write(tmp_path, "training_arguments.json")
    assert of(migrate([file], 4), "training.local_batch_size", "training.global_batch_size") == [
        2,
        2 * 8 * 4,
    ]

    accelerate = write(tmp_path, "accelerate.yaml")
    together = migrate([file, accelerate])
    assert of(together, "training.global_batch_size", "launch.nproc_per_node") == [2 * 8 * 2, 2]
    assert any("--nproc" in entry.text for entry in migrate([file]).entries)


def test_auto_defers_to_the_other_file(tmp_path):
    ours = write(tmp_path, "training_arguments.json")
    auto = tmp_path / "ds.json"
    auto.write_text(
        json.dumps(
            {
                "bf16": {"enabled": "auto"},
                "optimizer": {
                    "type": "AdamW",
                    "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"},
                },
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},
                "gradient_clipping": "auto",
                "train_batch_size": "auto",
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
            }
        )
    )
    migration = migrate([ours, auto], 2)

    assert of(migration, "optimizer.lr", "training.max_norm", "training.global_batch_size") == [
        3e-4,
        1.0,
        32,
    ]
    assert of(
        migration, "parallelism.fsdp_reshard_after_forward", "training.enable_cpu_offload"
    ) == ["always", True]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("FULL_SHARD", ("always", 1)),
        ("SHARD_GRAD_OP", ("never", 1)),
        ("NO_SHARD", (None, 2)),
        ("1", ("always", 1)),
    ],
)
def test_strategies_of_fsdp_are_followed(tmp_path, strategy, expected):
    text = FILES["accelerate.yaml"].replace("FULL_SHARD", strategy)
    migration = migration_of(tmp_path, "a.yaml", text)
    reshard, copies = of(
        migration,
        "parallelism.fsdp_reshard_after_forward",
        "parallelism.data_parallel_replicate_degree",
    )

    assert (reshard, copies or 1) == expected


def test_torchtune_references_are_replaced(tmp_path):
    migration = migrate([write(tmp_path, "torchtune.yaml")])
    assert of(migration, "model.hf_assets_path", "job.dump_folder") == [
        "/models/Llama-3.2-1B",
        "/models/out",
    ]
    assert of(migration, "lora.target_modules") == [
        ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    ]
    assert of(migration, "training.max_norm", "training.dtype") == [float("inf"), "bfloat16"]


AXOLOTL = """\
base_model: base
sequence_len: 64
datasets: [{path: a.jsonl, type: alpaca}]
adapter: lora
lora_r: 8
"""
TRL = json.dumps(
    {
        "model_name_or_path": "base",
        "per_device_train_batch_size": 1,
        "learning_rate": 1e-4,
        "lora_r": 8,
    }
)
ADAPTERS = {
    "axolotl.yml": AXOLOTL
    + "lora_target_modules: all-linear\nlora_modules_to_save: [lm_head]\npeft_use_dora: true\n",
    "trl.json": TRL[:-1]
    + ', "lora_target_modules": "all-linear", "lora_modules_to_save": ["lm_head"], "use_dora": true}',
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_all_adapter_options_of_a_file_are_followed(tmp_path, name):
    migration = migration_of(tmp_path, name, ADAPTERS[name])
    options = ("enable", "rank", "target_modules", "modules_to_save", "use_dora")
    assert of(migration, *(f"lora.{option}" for option in options)) == [
        True,
        8,
        ["all-linear"],
        ["lm_head"],
        True,
    ]
    assert not migration.unsupported

    # Without `adapter`, the same keys have no effect in axolotl.
    without = migration_of(
        tmp_path, "plain.yml", ADAPTERS["axolotl.yml"].replace("adapter: lora\n", "")
    )
    assert not [setting for setting in without.settings if setting.option.startswith("lora.")]

    verdicts = {entry.key: entry.verdict for entry in without.entries}
    assert {verdicts[key] for key in ("lora_r", "lora_modules_to_save", "peft_use_dora")} == {
        "ignored"
    }


def test_train_accepts_such_a_file_with_a_notice(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(LLAMA, indent=1))
    loaded = load(file, ["--training.steps", "3"])

    assert (loaded.config.training.steps, loaded.config.training.local_batch_size) == (3, 8)
    assert loaded.origins["training.local_batch_size"] == "ds.json:2"
    assert "recognized as a file of DeepSpeed" in loaded.notices[0]
    assert config.check(loaded) == []


@pytest.mark.parametrize("by_option", [False, True])
def test_config_reads_such_a_file_like_train(tmp_path, by_option, capsys):
    file = str(write(tmp_path, "llama.json"))
    arguments = ["--job.config_file", file] if by_option else [file]
    assert (
        cli.main(["config", "check", *arguments, "--nproc", "2", "--training.device", "cpu"]) == 0
    )

    output = capsys.readouterr().out
    for key in ("lr-decay-style", "warmup", "min_lr"):
        assert re.search(rf"ignored +llama.json:\d+: {key} = ", output), key
    assert re.search(
        r"renamed +llama.json:\d+: gradient_clipping = 1.0 -> training.max_norm", output
    )
    assert cli.main(["config", "show", *arguments, "--nproc", "2"]) == 0
    assert re.search(
        r"^global_batch_size = 32  # llama.json:\d+$", capsys.readouterr().out, re.MULTILINE
    )


def test_defaults_for_missing_data_and_model_are_reported(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(LLAMA))
    notices = "\n".join(load(file).notices)

    assert 'training.dataset = "python_stdlib"' in notices
    assert 'model.name = "llama3"' in notices

    # With both options set, no notice says that the file names no model or no data.
    with_options = load(file, ["--model.flavor", "8B", "--training.dataset", "c4"])
    assert "name no" not in "\n".join(with_options.notices)


@pytest.mark.parametrize("name", ["axolotl.yml", "training_arguments.json"])
def test_code_of_a_repository_is_refused(tmp_path, name):
    text = FILES[name]
    line = (
        '  "trust_remote_code": true,\n' if name.endswith("json") else "trust_remote_code: true\n"
    )
    text = text.replace("{\n", "{\n" + line, 1) if name.endswith("json") else line + text

    assert "trust_remote_code" in {
        entry.key for entry in migration_of(tmp_path, name, text).unsupported
    }


def test_train_rejects_unsupported_keys(tmp_path):
    file = tmp_path / "args.json"
    file.write_text('{"learning_rate": 1e-4,\n "num_train_epochs": 1,\n "optim_args": "x"}')
    with pytest.raises(ConfigError, match=r"args.json:3: optim_args=\"x\" is not supported"):
        load(file)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.json", '{"train_batch_size": 1,\n "gradient_cliping": 1}', "a.json:2: .*did you mean gradient_clipping"),
        ("a.json", '{"train_batch_size": 1,\n "strange": 1}', "a.json:2: strange.*DeepSpeed, the system recognized"),
        ("a.json", '{"train_batch_size": "many"}', "a.json:1: train_batch_size.*must be a number"),
        ("a.json", '{"max_steps": 1, "output_dir": "x",\n "learning_rat": 1}', "a.json:2: .*mean learning_rate"),
        ("a.yml", "image: x\nkind: Pod", "must be from a known system .*image, kind"),
        ("a.yml", "base_model: x\nmicro_batch_size: 1.5", "a.yml:2: micro_batch_size=1.5 must be a whole number"),
        ("a.yml", "distributed_type: 'NO'\ndistributed_type: FSDP", "a.yml:2: .*must not set distributed_type twice"),
        ("a.json", '{"train_batch_size": 1,\n "train_batch_size": 2}', "a.json:2: .*twice"),
        ("a.json", '{"train_batch_size": 1,\n "x" 2}', "a.json:2: .*not valid JSON"),
        ("a.json", '{"train_batch_size": 1', "a.json:1: .*not valid JSON"),
        ("a.json", "[1, 2]", "must contain a table"),
        ("a.yml", "a: [1\nb: 2", "a.yml:2: .*not valid YAML"),
        ("a.yml", "a: &x [1]\nb: *x", r"a.yml:2: .*must not use aliases \(\*x\)"),
        ("run.sh", "echo hello", "no command with --deepspeed_config"),
        ("run.sh", "deepspeed cli/train.py --train_steps $N --deepspeed_config x.json", "run.sh:1: train_steps.*shell"),
        ("run.sh", "deepspeed cli/train.py --train_steps 3 --deepspeed_config x.json", "x.json.* does not exist here"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named_with_its_line(tmp_path, name, text, expected):
    with pytest.raises(ConfigError, match=expected):
        migration_of(tmp_path, name, text)


def test_two_files_that_contradict_each_other_are_refused(tmp_path):
    first = write(tmp_path, "training_arguments.json")
    other = tmp_path / "ds.json"
    other.write_text('{"train_micro_batch_size_per_gpu": 4}')

    with pytest.raises(
        ConfigError, match=r"training.local_batch_size=4 contradicts 2 at training_arguments.json:2"
    ):
        migrate([first, other])


HOSTILE = {
    "code": "base_model: !!python/object/apply:os.system ['touch HERE']\nsequence_len: 1",
    "laughs": "a: &a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a]\nc: [*b,*b,*b]",
    "deep yaml": "a: " + "[" * 3000 + "]" * 3000,
    "deep open yaml": "[" * 300_000,
    "deep json": '{"train_batch_size": ' + "[" * 3000 + "]" * 3000 + "}",
    "many": "base_model: x\ndatasets: [" + "1, " * 100_000 + "]",
    "large": "a: " + "x" * 2**21,
    "number": "base_model: x\nmicro_batch_size: 1" + "0" * 6000,
    "reference": "model: {_component_: 'a.lora_b'}\n"
    + "\n".join(f"x{n}: '${{x{n + 1}}}${{x{n + 1}}}'" for n in range(40)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_runs_nothing_and_ends_soon(tmp_path, name):
    file = tmp_path / ("a.json" if "json" in name else "a.yml")
    file.write_text(HOSTILE[name].replace("HERE", str(tmp_path / "ran")))
    if name == "reference":
        assert migrate([file]).systems == ("torchtune",)
    else:
        with pytest.raises(ConfigError):
            migrate([file])

    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "name", ["torchtitan.toml", "ds_config.json", "accelerate.yaml", "training_args.json"]
)
def test_migrate_prints_every_note_of_check(tmp_path, capsys, name):
    """``migrate`` omits a note only if it repeats what is printed for the same key."""
    example = ROOT / "examples/migrate" / name
    cli.main(["config", "check", str(example), "--for-machine", "none"])
    notes = re.findall(r"^note: (.*)", capsys.readouterr().out, re.MULTILINE)

    assert cli.main(["config", "migrate", str(example), "-o", str(tmp_path / "new.toml")]) == 0

    printed = re.sub(r"^(note: |renamed +)", "", capsys.readouterr().out, flags=re.MULTILINE)
    missing = [note for note in notes if note.partition(": ")[2] not in printed]
    assert notes
    assert not missing


@pytest.mark.parametrize("system", ["Trainer", "axolotl", "torchtune"])
def test_optimizers_of_8_bits_stay_of_8_bits(tmp_path, system):
    if system == "Trainer":
        arguments = {
            "output_dir": "out",
            "per_device_train_batch_size": 2,
            "optim": "adamw_bnb_8bit",
        }
        migration = migration_of(
            tmp_path, "training_args.json", {**arguments, "report_to": ["mlflow", "trackio"]}
        )
        assert of(migration, "metrics.enable_mlflow", "metrics.enable_trackio") == [True, True]
    elif system == "axolotl":
        file = write(tmp_path, "axolotl.yml")
        assert "optimizer: paged_adamw_8bit" in file.read_text()
        migration = migrate([file])
    else:
        file = write(tmp_path, "torchtune.yaml")
        text = re.sub(r"torch.optim.AdamW", "bitsandbytes.optim.PagedAdamW8bit", file.read_text())
        assert "PagedAdamW8bit" in text
        migration = migration_of(tmp_path, "bits.yaml", text)

    assert of(migration, "optimizer.name") == ["AdamW8bit"]


def test_losses_and_packing_of_trl_are_followed(tmp_path):
    arguments = {"output_dir": "out", "per_device_train_batch_size": 2}
    dpo = {
        "beta": 0.2,
        "loss_type": ["robust"],
        "label_smoothing": 0.1,
        "reference_free": False,
        "rpo_alpha": 0.5,
    }
    migration = migration_of(tmp_path, "dpo.json", {**arguments, **dpo})
    options = ("name", "beta", "loss_type", "label_smoothing", "nll_weight")

    assert of(migration, *(f"task.{option}" for option in options)) == [
        "preference",
        0.2,
        "robust",
        0.1,
        0.5,
    ]
    assert not migration.unsupported
    assert migration_of(
        tmp_path, "sppo.json", {**arguments, "beta": 0.2, "loss_type": "sppo_hard"}
    ).unsupported

    for packing, expected in (
        ({"packing": True}, "concat"),
        ({"packing": True, "packing_strategy": "wrapped"}, "concat"),
        ({"packing": True, "packing_strategy": "bfd"}, "best_fit"),
        ({"packing": False, "packing_strategy": "bfd"}, "padded"),
    ):
        migration = migration_of(tmp_path, "sft.json", {**arguments, **packing})
        assert of(migration, "data.packing") == [expected]
        assert not migration.unsupported
