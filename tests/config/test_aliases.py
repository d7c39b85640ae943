"""Older files keep their meaning. Each old name has one notice, and none is dropped silently."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from shardtrain.compat.migrate import migrate
from shardtrain.config import (
    Loaded,
    check,
    load,
    load_settings,
    notes,
    read_model_file,
    resolved_toml,
    shape,
)
from shardtrain.config.aliases import ALIASES
from shardtrain.config.options import options
from shardtrain.utils.errors import ConfigError

FIXTURES = Path(__file__).parent.parent / "fixtures" / "configs"
FILES = sorted(FIXTURES.rglob("*.toml"))
AGES = ("torchtrain_2024_02", "torchtitan_2024_04", "torchtitan_2025_02", "torchtitan_v0_2_2")


def read(tmp_path: Path, text: str, *arguments: str) -> Loaded:
    file = tmp_path / "old.toml"
    file.write_text(text)
    return load(file, arguments)


def values(loaded: Loaded, *names: str) -> tuple[object, ...]:
    return tuple(loaded.value(name) for name in names)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_files_of_every_age_check_without_errors(file: Path) -> None:
    loaded = load(file)
    assert check(loaded) == []
    # The flavors of qwen3 with experts have a separate model file.
    assert (loaded.notices == ()) == (
        file.parent.name == "torchtitan_v0_2_2" and "moe" not in file.stem
    )


def test_there_are_fixtures_of_every_age() -> None:
    assert [len(list((FIXTURES / age).glob("*.toml"))) for age in AGES] == [1, 4, 4, 11]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_every_key_of_a_file_is_set_or_mentioned(file: Path) -> None:
    """Each ``key = value`` line must be the origin of an option or of a notice."""
    loaded = load(file)
    mentioned = set(loaded.origins.values()) | {
        notice.partition(": ")[0] for notice in loaded.notices
    }
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if "=" in line:
            assert f"{file.name}:{number}" in mentioned, line


def test_every_alias_leads_to_an_option_and_hides_none() -> None:
    for old, alias in ALIASES.items():
        assert old not in options()
        assert alias.new is None or alias.new in options()
        assert alias.new is not None or alias.why


def test_torchtrain_2024_02_debug_model() -> None:
    loaded = load(FIXTURES / "torchtrain_2024_02" / "debug_model.toml")
    c = loaded.config
    assert (c.model.name, c.model.flavor) == ("llama2", "debugmodel")
    assert c.model.tokenizer_path == "./torchtrain/datasets/tokenizer/tokenizer.model"
    assert (c.profiling.enable_profiling, c.profiling.profile_freq) == (True, 10)
    assert (c.training.local_batch_size, c.training.steps) == (8, 10)
    assert (c.lr_scheduler.name, c.lr_scheduler.warmup_steps) == ("linear_linear", 2)
    assert (c.optimizer.beta2, c.optimizer.weight_decay) == (0.999, 0.01)
    assert (c.parallelism.data_parallel_shard_degree, c.parallelism.tensor_parallel_degree) == (
        -1,
        1,
    )
    assert (c.checkpoint.enable, c.checkpoint.interval, c.checkpoint.folder) == (
        False,
        3600,
        "checkpoint",
    )
    assert c.checkpoint.interval_type == "steps"


@pytest.mark.parametrize(
    ("name", "flavor", "norm", "lr", "batch", "seq_len", "steps", "warmup", "tp", "mode", "option"),
    [
        ("debug_model", "debugmodel", "fused_rmsnorm", 8e-4, 8, 2048, 10, 2, 1, "selective", "2"),
        ("llama_7b", "7B", "fused_rmsnorm", 3e-4, 8, 2048, 1000, 200, 1, "selective", "op"),
        ("llama_13b", "13B", "fused_rmsnorm", 3e-4, 2, 4096, 1000, 200, 1, "selective", "op"),
        ("llama_70b", "70B", "rmsnorm", 1.5e-4, 16, 4096, 1000, 200, 8, "full", "2"),
    ],
)
def test_torchtitan_2024_04(
    name: str, flavor: str, norm: str, lr: float, batch: int, seq_len: int, steps: int, warmup: int, tp: int,
    mode: str, option: str,
) -> None:  # fmt: skip
    c = load(FIXTURES / "torchtitan_2024_04" / f"{name}.toml").config
    assert (c.model.name, c.model.flavor) == ("llama2", flavor)
    assert (c.model.norm_type, c.model.converters) == (norm, [])
    assert (c.optimizer.lr, c.optimizer.beta2, c.optimizer.weight_decay) == (lr, 0.95, 0.1)
    assert c.training.local_batch_size == batch
    assert c.training.seq_len == seq_len
    assert c.training.steps == steps
    assert (c.lr_scheduler.name, c.lr_scheduler.warmup_steps) == ("linear_linear", warmup)
    assert c.parallelism.data_parallel_shard_degree == -1
    assert c.parallelism.tensor_parallel_degree == tp
    assert c.activation_checkpoint.mode == mode
    assert c.activation_checkpoint.selective_ac_option == option
    assert (c.checkpoint.enable, c.checkpoint.last_save_model_only) == (False, False)
    assert c.profiling.enable_profiling
    assert not c.metrics.disable_color_printing
    assert not c.compile.enable


@pytest.mark.parametrize(
    ("name", "flavor", "lr", "batch", "seq_len", "steps", "warmup", "tp", "mode", "enable"),
    [
        ("debug_model", "debugmodel", 8e-4, 8, 2048, 10, 2, 1, "selective", False),
        ("llama3_8b", "8B", 3e-4, 1, 8192, 1000, 200, 1, "selective", True),
        ("llama3_70b", "70B", 1.5e-4, 8, 8192, 1000, 200, 8, "full", True),
        ("llama3_405b", "405B", 8e-5, 2, 8192, 3000, 600, 8, "full", True),
    ],
)
def test_torchtitan_2025_02(
    name: str, flavor: str, lr: float, batch: int, seq_len: int, steps: int, warmup: int, tp: int, mode: str,
    enable: bool,
) -> None:  # fmt: skip
    c = load(FIXTURES / "torchtitan_2025_02" / f"{name}.toml").config
    large = flavor == "405B"
    assert (c.model.name, c.model.flavor) == ("llama3", flavor)
    assert c.model.converters == (["quantize.linear.float8"] if large else [])
    assert c.optimizer.lr == lr
    assert c.training.local_batch_size == batch
    assert c.training.seq_len == seq_len
    assert c.training.steps == steps
    assert (c.lr_scheduler.name, c.lr_scheduler.warmup_steps) == ("linear_linear", warmup)

    p = c.parallelism
    assert (p.data_parallel_replicate_degree, p.data_parallel_shard_degree) == (1, -1)
    assert (p.tensor_parallel_degree, p.context_parallel_degree) == (tp, 1)
    assert p.pipeline_parallel_degree == 1
    assert p.enable_async_tensor_parallel is large

    assert (c.compile.enable, c.activation_checkpoint.mode) == (large, mode)
    assert (c.checkpoint.enable, c.checkpoint.last_save_model_only) == (enable, False)
    assert c.checkpoint.folder == ("/checkpoints" if enable else "checkpoint")

    float8 = c.quantize.linear.float8
    assert float8.enable_fsdp_float8_all_gather is large
    assert float8.precompute_float8_dynamic_scale_for_fsdp is large
    assert c.debug.seed == 42


@pytest.mark.parametrize("name", ["debug_model", "llama3_8b", "llama3_70b", "llama3_405b"])
def test_torchtitan_v0_2_2_runs_under_its_own_names(name: str) -> None:
    loaded = load(FIXTURES / "torchtitan_v0_2_2" / f"{name}.toml")
    c = loaded.config
    assert c.lr_scheduler.name == "warmup_stable_decay"
    assert c.checkpoint.last_save_model_only is (name != "debug_model")
    assert c.model.converters == (["quantize.linear.float8"] if name == "llama3_405b" else [])
    assert c.quantize.linear.float8.filter_fqns == ["output"]
    assert shape(read_model_file(c.model.name), c.model.flavor, c.model.overrides)[
        "num_layers"
    ] in (6, 32, 80, 126)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f"{f.parent.name}/{f.stem}")
def test_the_resolved_form_of_an_old_file_needs_no_alias(file: Path, tmp_path: Path) -> None:
    config = load(file).config
    again = read(tmp_path, resolved_toml(config))
    assert again.config == config
    assert again.notices == ()


@pytest.mark.parametrize(
    ("text", "option", "value"),
    [
        ("[metrics]\nenable_color_printing = false", "metrics.disable_color_printing", True),
        ("[metrics]\nrank_0_only = false", "metrics.save_for_all_ranks", True),
        ("[training]\nenable_loss_parallel = false", "parallelism.disable_loss_parallel", True),
        ("[optimizer]\nfused = true", "optimizer.implementation", "fused"),
        ("[optimizer]\nfused = false", "optimizer.implementation", "foreach"),
        ("[optimizer]\nfused = false\nforeach = false", "optimizer.implementation", "for-loop"),
        ("[optimizer]\nforeach = true\nfused = true", "optimizer.implementation", "fused"),
        ("[optimizer]\nfused = false\nforeach = true", "optimizer.implementation", "foreach"),
        ("[training]\nsequence_parallel_degree = 4", "parallelism.tensor_parallel_degree", 4),
        ("[training]\ndeterministic = true", "debug.deterministic", True),
        ("[training]\nseed = 7", "debug.seed", 7),
        ('[training]\nfp8_linear = "dynamic"', "model.converters", ["quantize.linear.float8"]),
        ("[float8]\nenable_float8_linear = true", "model.converters", ["quantize.linear.float8"]),
        (
            '[float8]\nenable_float8_linear = true\n[model]\nconverters = ["quantize.linear.mx"]',
            "model.converters",
            ["quantize.linear.mx", "quantize.linear.float8"],
        ),
        (
            '[model]\nconverters = "float8,mx"',
            "model.converters",
            ["quantize.linear.float8", "quantize.linear.mx"],
        ),
        (
            '[float8]\nfilter_fqns = "output, attn"',
            "quantize.linear.float8.filter_fqns",
            ["output", "attn"],
        ),
        ('[mx]\nrecipe_name = "mxfp8"', "quantize.linear.mx.recipe_name", "mxfp8_cublas"),
        (
            '[mx]\nrecipe_name = "mxfp8_cublas_rceil"',
            "quantize.linear.mx.recipe_name",
            "mxfp8_cublas_rceil",
        ),
        (
            "[mx]\nuse_fp8_dim1_cast_triton_kernel = false",
            "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice",
            "triton",
        ),
        ("[validation]\nenabled = true", "validation.enable", True),
        ("[checkpoint]\nmodel_weights_only = true", "checkpoint.last_save_model_only", True),
        ('[training]\ncheckpoint_folder = "ckpt"', "checkpoint.folder", "ckpt"),
        ('[training]\ncheckpoint_folder = "ckpt"', "checkpoint.enable", True),
        ('[checkpoint]\nfolder = ""', "checkpoint.enable", False),
        (
            '[checkpoint]\nfolder = "x"\n[training]\ndata_parallel_degree = -1',
            "checkpoint.enable",
            True,
        ),
        ('[checkpoint]\nfolder = "x"', "checkpoint.enable", False),
        ('[experimental]\ncustom_model_path = "my_model.py"', "model.name", "my_model.py"),
        (
            "[experimental]\npipeline_parallel_microbatches = 4",
            "parallelism.pipeline_parallel_microbatch_size",
            2,
        ),
        ("[lr_scheduler]\nlr_min = 0.1", "lr_scheduler.min_lr_factor", 0.1),
        ("[training]\nwarmup_pct = 0.01\nsteps = 1000", "lr_scheduler.warmup_steps", 10),
        (
            "[training]\nwarmup_steps = 3\n[lr_scheduler]\ndecay_ratio = 0.5",
            "lr_scheduler.name",
            "warmup_stable_decay",
        ),
    ],
    ids=lambda v: v.replace("\n", " ") if isinstance(v, str) else None,
)
def test_an_old_value_keeps_its_meaning(
    tmp_path: Path, text: str, option: str, value: object
) -> None:
    assert read(tmp_path, text).value(option) == value


def test_an_alias_carries_its_origin_and_one_notice(tmp_path: Path) -> None:
    loaded = read(tmp_path, "[training]\n\nbatch_size = 3\n")
    assert loaded.origins["training.local_batch_size"] == "old.toml:3"
    assert loaded.notices == (
        "old.toml:3: training.batch_size is called training.local_batch_size now",
    )


def test_the_command_line_takes_old_names_and_beats_the_file(tmp_path: Path) -> None:
    text = "[training]\nbatch_size = 3\nwarmup_pct = 0.5\nsteps = 10\n"
    arguments = ["--training.compile", "--training.local_batch_size=5", "--training.steps=40"]
    loaded = read(tmp_path, text, *arguments)

    # The warmup is half of the 40 steps of the command line, not of the 10 steps of the file.
    options = ("compile.enable", "training.local_batch_size", "lr_scheduler.warmup_steps")
    assert values(loaded, *options) == (True, 5, 20)
    assert loaded.origins["compile.enable"] == "command line"

    text = "[training]\nlocal_batch_size = 3\n"
    loaded = read(tmp_path, text, "--training.batch_size", "6", "--job.no_print_args")

    assert values(loaded, "training.local_batch_size", "job.print_config") == (6, False)


def test_options_without_a_counterpart_are_reported_as_ignored(tmp_path: Path) -> None:
    loaded = read(
        tmp_path,
        "[job]\nuse_for_integration_test = true\n[experimental]\nenable_compiled_autograd = true\n",
    )

    assert len(loaded.notices) == 2
    assert all(" is ignored: " in notice for notice in loaded.notices)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[global]\ndump_folder = "./o"', {"job.dump_folder": "./o"}),
        ("[training]\nfp8_linear = false", {"model.converters": []}),
        ("[training]\nfp8_linear = true", {"model.converters": ["quantize.linear.float8"]}),
        ("[training]\nenable_selective_ac = false", {"activation_checkpoint.mode": "full"}),
        ("[training]\nenable_selective_ac = true", {"activation_checkpoint.mode": "selective"}),
        ("[training]\ndebug_moe_force_load_balance = true", {"debug.moe_force_load_balance": True}),
        (
            "[model]\nuse_flex_attn = false\nattn_mask_type = 'causal'",
            {"data.document_mask": "off"},
        ),
        (
            "[model]\nuse_flex_attn = true\nattn_mask_type = 'block_causal'",
            {"data.document_mask": "on"},
        ),
        ("[model]\nnorm_type = 'compiled_rmsnorm'", {"model.norm_type": "rmsnorm"}),
        (
            "[model]\nname = 'llama'\nflavor = '40B'",
            {"model.name": "llama2", "model.flavor": "26B"},
        ),
        ("[model]\nflavor = '8B_flex'", {"model.flavor": "8B", "data.document_mask": "on"}),
        (
            "[model]\nflavor = 'debugmodel_varlen_attn'",
            {"model.flavor": "debugmodel", "data.document_mask": "on"},
        ),
        ("[float8]\nmoe_fqns = ['experts']", {"quantize.grouped_mm.float8.fqns": []}),
        ("[float8]\nscaling_type_input = 'dynamic'", {"quantize.linear.float8.recipe_name": None}),
        (
            "[training]\nenable_fsdp_fp8_all_gather = true",
            {"quantize.linear.float8.enable_fsdp_float8_all_gather": True},
        ),
        (
            "[quantize.dense.float8]\nfilter_fqns = ['output']",
            {"quantize.linear.float8.filter_fqns": ["output"]},
        ),
        ("[quantize.moe.mx]\nfqns = ['experts']", {"quantize.grouped_mm.mx.fqns": ["experts"]}),
        (
            "[model]\nconverters = ['quantize.dense.mx']",
            {"model.converters": ["quantize.linear.mx"]},
        ),
        (
            "[experimental]\npipeline_parallel_schedule = 'flexible_interleaved_1f1b'",
            {"parallelism.pipeline_parallel_schedule": "Interleaved1F1B"},
        ),
        ("[experimental]\ncustom_model_path = ''", {"model.name": "llama3"}),
        (
            "[training]\ndataset = ''\ndataset_path = './d'",
            {"training.dataset": "huggingface", "training.dataset_path": "./d"},
        ),
        ("[training]\ncompile = false\n[compile]\nenable = true", {"compile.enable": True}),
        (
            "[validation]\nenabled = true",
            {"validation.enable": True, "validation.dataset": "c4_validation"},
        ),
        (
            "[training]\ndataset = 'c4'\n[validation]\nenable = true",
            {"validation.dataset": "c4_validation"},
        ),
        ("[metrics]\nuse_for_integration_test = true", {}),
    ],
    ids=lambda case: case.splitlines()[1].split(" ")[0] if isinstance(case, str) else "",
)
def test_options_of_older_torchtitan_versions_are_accepted_with_a_notice(
    tmp_path: Path, text: str, expected: dict[str, object]
) -> None:
    """Each case is from a published file. The notice names the old name or value with its line."""
    loaded = read(tmp_path, text)
    assert {name: loaded.value(name) for name in expected} == expected
    assert any("old.toml:" in notice for notice in loaded.notices)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[float8]\nscaling_type_weight = 'delayed'", "scaling_type_weight"),
        (
            "[experimental]\npipeline_parallel_split_points = ['layers.4', 'layers.2']",
            "split_points",
        ),
        ("[experimental]\npipeline_parallel_split_points = 'layers.99'", r"layers\.1 to layers\.5"),
        ("[model]\nattn_mask_type = 'sliding'", "block_causal"),
    ],
)
def test_an_unsupported_old_value_is_rejected_by_name(
    tmp_path: Path, text: str, names: str
) -> None:
    with pytest.raises(ConfigError, match=names):
        read(tmp_path, text)


def test_split_points_become_the_modules_of_each_stage(tmp_path: Path) -> None:
    text = "[experimental]\npipeline_parallel_degree = 3\npipeline_parallel_split_points = 'layers.2,layers.4'"
    loaded = read(tmp_path, text)
    assert loaded.value("parallelism.module_fqns_per_model_part") == [
        ["tok_embeddings", "layers.0", "layers.1"],
        ["layers.2", "layers.3"],
        ["layers.4", "layers.5", "norm", "output"],
    ]
    assert check(loaded) == []


def test_one_option_given_alike_under_two_names_is_not_a_mistake(tmp_path: Path) -> None:
    loaded = read(tmp_path, "[checkpoint]\nenable = true\nenable_checkpoint = true")
    assert loaded.value("checkpoint.enable") is True
    assert any("old.toml:3" in notice for notice in loaded.notices)
    with pytest.raises(ConfigError, match="given twice"):
        read(tmp_path, "[checkpoint]\nenable = true\nenable_checkpoint = false")


def test_transformers_modeling_backend_is_a_model_of_transformers(tmp_path: Path) -> None:
    model = "[model]\nname = 'transformers_modeling_backend'\nflavor = 'full'\n"
    model += "[hf_transformers]\nmodel = 'Qwen/Qwen3-4B'"
    loaded = read(tmp_path, model)

    assert loaded.config.model.name == "transformers"
    assert any("hf_assets_path" in notice for notice in loaded.notices)


def test_torch_spmd_is_ignored_with_a_notice(tmp_path: Path) -> None:
    loaded = read(tmp_path, "[experimental]\ntorch_spmd = true")
    assert check(loaded) == []
    assert any("experimental.torch_spmd is ignored" in notice for notice in loaded.notices)


@pytest.mark.parametrize(
    "switch", ["compile.enable", "metrics.enable_tensorboard", "checkpoint.enable"]
)
def test_a_switch_that_is_off_is_not_called_without_effect(tmp_path: Path, switch: str) -> None:
    section, _, key = switch.partition(".")
    assert not [
        note for note in notes(read(tmp_path, f"[{section}]\n{key} = false")) if switch in note
    ]


def test_ineffective_options_are_reported(tmp_path: Path) -> None:
    without_compile = "[parallelism]\nenable_async_tensor_parallel = true"
    off = "[checkpoint]\nenable = false\ninitial_load_path = 'x'"
    for text, option in (
        (without_compile, "enable_async_tensor_parallel"),
        (off, "initial_load_path"),
    ):
        loaded = read(tmp_path, text)
        assert check(loaded) == []
        assert any(option in note and "without effect" in note for note in notes(loaded))
    forgotten = read(tmp_path, "[checkpoint]\ninitial_load_path = 'x'")

    assert [problem.option for problem in check(forgotten)] == ["checkpoint.initial_load_path"]


@pytest.mark.parametrize(
    ("name", "flavor", "today"),
    [
        ("llama2", "40B", "26B"),
        ("llama4", "17bx16e_irope", "17bx16e"),
        ("deepseek_v2", "deepseek-ai/DeepSeek-V2-Lite", "16B"),
    ],
)
def test_a_flavor_of_another_name_is_found_with_a_notice(
    tmp_path: Path, name: str, flavor: str, today: str
) -> None:
    loaded = read(tmp_path, f"[model]\nname = '{name}'\nflavor = '{flavor}'")
    assert check(loaded) == []
    assert loaded.config.model.flavor == today
    assert any("model.flavor" in notice for notice in loaded.notices)


@pytest.mark.parametrize("name", ["qwen3_5", "kimi_k2"])
def test_an_unsupported_torchtitan_model_names_an_alternative(tmp_path: Path, name: str) -> None:
    problems = check(read(tmp_path, f"[model]\nname = '{name}'"))
    assert any('model.name = "transformers"' in str(problem) for problem in problems)


@pytest.mark.parametrize(
    ("text", "misleading"),
    [
        ("[model]\nhead = 'linear'", "model.check"),
        ("[training]\nvocab_size = 3", "local_batch_size"),
        ("[optimizer]\nunembed_lr = 0.1", "optimizer.name"),
        ("[float8]\nunheard_of = 1", "lora"),
    ],
)
def test_an_unknown_key_is_not_mistaken_for_another(
    tmp_path: Path, text: str, misleading: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, text)
    assert misleading not in str(raised.value)


LLAMA = '[model]\nname = "llama3"\nflavor = "{}"\n'
DEEPSEEK = '[model]\nname = "deepseek_v3"\nflavor = "16B"\n[training]\nseq_len = {}\n'
OLD = "[training]\nbatch_size = 2\n"
C4 = '[training]\ndataset = "c4"\n'


def angles(loaded: Loaded) -> str:
    (note,) = [note for note in notes(loaded) if note.startswith("rotary angles: ")] or [""]
    return note


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (LLAMA.format("debugmodel") + OLD, "torchtitan v0.2 scales those of every Llama 3"),
        (LLAMA.format("debugmodel") + C4, "torchtitan v0.2 scales those of every Llama 3"),
        (LLAMA.format("8B") + OLD, "as in torchtitan since v0.2"),
        (LLAMA.format("8B") + C4, ""),
        (LLAMA.format("debugmodel"), ""),  # no torchtitan keys: a file of this package
        (OLD, ""),  # names no model
        (LLAMA.format("8B") + '[model.overrides]\nrope_scaling = "none"\n' + OLD, ""),
        (
            DEEPSEEK.format(4096) + 'dataset = "c4"\n',
            "only does so if training.seq_len exceeds 4096",
        ),
        (DEEPSEEK.format(4097) + 'dataset = "c4"\n', ""),
        (DEEPSEEK.format(2048) + 'dataset = "c4"\n[model.overrides]\nrope_factor = 1.0\n', ""),
    ],
)
def test_a_file_of_torchtitan_with_other_rotary_angles_is_reported_once(tmp_path, text, part):
    note = angles(read(tmp_path, text))
    assert part in note
    assert bool(note) == bool(part)


def test_files_of_other_systems_have_no_note_about_torchtitan_s_angles(tmp_path):
    """Keys that torchtune renames are no sign of torchtitan. torchtune scales Llama 3.1 like this package."""
    text = "\n".join(
        [
            "model:\n  _component_: torchtune.models.llama3_1.llama3_1_8b",
            "checkpointer:\n  _component_: torchtune.training.FullModelHFCheckpointer\n  checkpoint_dir: /models/llama",
            "dataset:\n  _component_: torchtune.datasets.alpaca_dataset\nbatch_size: 2\nepochs: 1\n",
        ]
    )
    (tmp_path / "config.yaml").write_text(text)
    migration = migrate([tmp_path / "config.yaml"])
    loaded = load_settings(
        migration.settings, ["--model.name", "llama3", "--model.flavor", "8B"], follow=False
    )

    assert migration.entries
    assert angles(dataclasses.replace(loaded, renames=tuple(map(str, migration.entries)))) == ""


def test_a_notice_of_a_rename_is_not_a_warning(tmp_path):
    """The trainer logs renames as INFO, and notices about changed results as warnings."""
    text = "[training]\nbatch_size = 2\ncompile = true\n[metrics]\nrank_0_only = true\n"
    loaded = read(tmp_path, text)
    assert len(loaded.notices) == 3
    assert loaded.renames == loaded.notices

    # Masks of documents change the positions of tokens, so their notices are warnings.
    mask = "[model]\nname = 'llama3'\nflavor = '8B_flex'\n"
    for changed in (mask, "[model]\nattn_mask_type = 'block_causal'\n"):
        loaded = read(tmp_path, changed)
        (warning,) = [notice for notice in loaded.notices if notice not in loaded.renames]
        assert "positions restart in each" in warning

    # If a file has both the old and the new name, the notice is a warning.
    loaded = read(tmp_path, "[training]\nbatch_size = 2\nlocal_batch_size = 2\n")
    (warning,) = [notice for notice in loaded.notices if notice not in loaded.renames]
    assert "too, as here" in warning


def test_expert_tensor_parallelism_is_accepted_like_in_torchtitan(tmp_path):
    """The degree may be 1 or the tensor-parallel degree.

    It does not split experts here, which only takes more memory than in torchtitan.
    """
    experts = '[model]\nname = "qwen3"\nflavor = "debugmodel_moe"\n[parallelism]\ntensor_parallel_degree = 2\n'
    option = "parallelism.expert_tensor_parallel_degree"
    for degree, errors, num_notes in ((1, 0, 0), (2, 0, 1), (4, 1, 1)):
        loaded = read(tmp_path, f"{experts}expert_tensor_parallel_degree = {degree}\n")
        assert [problem.option for problem in check(loaded)] == [option] * errors
        assert sum(option in note for note in notes(loaded)) == num_notes


def test_a_dashboard_of_2024_finds_its_tag(tmp_path):
    old = "[training]\ndata_parallel_degree = -1\n[metrics]\nenable_tensorboard = true\n"
    assert read(tmp_path, old).config.metrics.legacy_tags is True
    assert read(tmp_path, old + "legacy_tags = false\n").config.metrics.legacy_tags is False
    assert (
        read(tmp_path, "[metrics]\nenable_tensorboard = true\n").config.metrics.legacy_tags is False
    )
