"""Each wrong config is reported as exactly one problem: option, value, rule and fix."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from shardtrain.config import ConfigError, Loaded, check, load, options
from shardtrain.config.rules.model_rules import model_shape
from shardtrain.models import deepseek_v3

# (name, lines of the file, arguments, fragments of the one expected problem)
READING = [
    (
        "unknown key",
        "[training]\nstepz = 3",
        [],
        ["run.toml:2:", "training.stepz=3", "not an option", "training.steps?"],
    ),
    (
        "unknown section",
        "[traning]\nsteps = 3",
        [],
        ["run.toml:1:", "[traning]", "not a section", "[training]?"],
    ),
    (
        "unknown nested section",
        "[training.dataloadr]\nnum_workers = 1",
        [],
        ["run.toml:1: [training.dataloadr] is not a section", "[training.dataloader]?"],
    ),
    (
        "key of another section",
        "[training]\nbeta1 = 0.5",
        [],
        ["training.beta1=0.5", "did you mean optimizer.beta1?"],
    ),
    (
        "misspelt section of an argument",
        "",
        ["--checkpint.enable"],
        ["is not an option", "did you mean checkpoint.enable?"],
    ),
    (
        "key of many sections",
        "",
        ["--nothing.enable"],
        ["is not an option", "`shardtrain config show` lists"],
    ),
    (
        "section as a value",
        "training = 3",
        [],
        ["training=3", "is a section", "write [training] above its keys"],
    ),
    (
        "top-level key",
        "steps = 3",
        [],
        ["steps=3", "not an option", "did you mean training.steps?"],
    ),
    (
        "fraction for an integer",
        "[training]\nsteps = 1.5",
        [],
        ["steps=1.5", "must be an integer", "write 1 or 2"],
    ),
    (
        "boolean for an integer",
        "[training]\nsteps = true",
        [],
        ["steps=true", "must be an integer", "whole number"],
    ),
    (
        "quoted integer",
        '[training]\nsteps = "10"',
        [],
        ['steps="10"', "must be an integer", "without quotes: 10"],
    ),
    (
        "huge integer",
        "",
        ["--training.steps", "1" + "0" * 400],
        ["must be an integer of 64 bits", "a smaller number"],
    ),
    (
        "full-width digits",
        "",
        ["--training.steps", "\uff11\uff12"],
        ["must be an integer", "write a whole number"],
    ),
    (
        "leading zero",
        '[training]\nsteps = "010"',
        [],
        ["must be an integer", "write a whole number"],
    ),
    (
        "quoted infinity",
        '[optimizer]\nlr = "inf"',
        [],
        ["must be a number", "write a number such as"],
    ),
    (
        "integer of more than 64 bits",
        "[training]\nsteps = 1e21",
        [],
        ["steps=1e+21", "must be an integer of 64 bits"],
    ),
    (
        "integer of more than 64 bits as an argument",
        "",
        ["--metrics.log_freq", "1e300"],
        ["metrics.log_freq", "must be an integer of 64 bits", "smaller number"],
    ),
    ("infinite integer", "[training]\nsteps = inf", [], ["steps=inf", "must be an integer"]),
    (
        "quoted number",
        '[optimizer]\nlr = "3e-4"',
        [],
        ['lr="3e-4"', "must be a number", "without quotes: 3e-4"],
    ),
    ("boolean for a number", "[optimizer]\nlr = false", [], ["lr=false", "must be a number"]),
    ("nan", "[optimizer]\nlr = nan", [], ["lr=nan", "must be a number", "nan is not one"]),
    (
        "number for a boolean",
        "[compile]\nenable = 1",
        [],
        ["enable=1", "must be true or false", "write true"],
    ),
    (
        "word for a boolean",
        '[compile]\nenable = "no"',
        [],
        ['enable="no"', "must be true or false", "write false"],
    ),
    (
        "number for text",
        "[activation_checkpoint]\nselective_ac_option = 2",
        [],
        ["=2", "must be text", 'in quotes: "2"'],
    ),
    (
        "word not in the list",
        '[optimizer]\nimplementation = "Fused"',
        [],
        ['implementation="Fused"', '"fused", "foreach"', 'did you mean "fused"?'],
    ),
    (
        "dtype",
        '[training]\nmixed_precision_param = "foo"',
        [],
        ["must be one of", 'use "bfloat16"'],
    ),
    (
        "literal in a list",
        '[compile]\ncomponents = ["modle"]',
        [],
        ["components", "must be one of", 'mean "model"?'],
    ),
    (
        "text for a list",
        '[optimizer]\nno_weight_decay = "*.bias"',
        [],
        ["must be a list", 'write ["*.bias"]'],
    ),
    (
        "flat list of lists",
        '[parallelism]\nmodule_fqns_per_model_part = ["a"]',
        [],
        ["must be a list", 'write ["a"]'],
    ),
    (
        "table for an option",
        "[training.steps]\nx = 1",
        [],
        ["training.steps", "must be an integer"],
    ),
    (
        "list as an override",
        "[model.overrides]\ndim = [1]",
        [],
        ["model.overrides.dim=[1]", "must be a number"],
    ),
    (
        "syntax error",
        "[training]\nsteps = = 3",
        [],
        ["run.toml:2:", "not valid TOML", "correct this line"],
    ),
    (
        "duplicate key",
        "[training]\nsteps = 3\nsteps = 4",
        [],
        ["run.toml:3:", "not valid TOML", "overwrite"],
    ),
    (
        "old and new name",
        "[training]\nbatch_size = 1\nlocal_batch_size = 2",
        [],
        ["local_batch_size", "given twice"],
    ),
    (
        "unknown old key",
        "[float8]\nfilter_fqnz = []",
        [],
        ["float8.filter_fqnz", "did you mean float8.filter_fqns?"],
    ),
    (
        "old value",
        '[training]\nfp8_linear = "static"',
        [],
        ["training.fp8_linear", '"" or "dynamic"', "converters"],
    ),
    (
        "old type",
        "[training]\nbatch_size = 1.5",
        [],
        ["training.batch_size=1.5", "must be an integer"],
    ),
    (
        "plain copies",
        '[training]\ndata_parallel_type = "ddp"',
        [],
        ["data_parallel_type", "replicate_degree"],
    ),
    (
        "split points",
        '[experimental]\npipeline_parallel_split_points = ["layers.9"]',
        [],
        ["split_points", "parallelism.module_fqns_per_model_part"],
    ),
    (
        "micro-batches",
        "[experimental]\npipeline_parallel_microbatches = 3",
        [],
        [
            "pipeline_parallel_microbatches=3",
            "does not divide the local batch of 8",
            "choose a divisor",
        ],
    ),
    (
        "unknown argument",
        "",
        ["--training.stepz", "1"],
        ["command line:", "--training.stepz", "mean training.steps?"],
    ),
    (
        "unknown section of an argument",
        "",
        ["--trainin.steps=1"],
        ["--trainin.steps", "mean training.steps?"],
    ),
    (
        "argument without value",
        "",
        ["--training.steps"],
        ["--training.steps", "has no value", "--training.steps VALUE"],
    ),
    (
        "argument twice",
        "",
        ["--training.steps=1", "--training.steps=2"],
        ["--training.steps", "given twice", "give it once"],
    ),
    (
        "section as an argument",
        "",
        ["--training", "3"],
        ["--training", "is a section", "--training.KEY"],
    ),
    (
        "stray word",
        "",
        ["steps", "--training.steps=1"],
        ['"steps"', "belongs to no option", "--section.key VALUE"],
    ),
    (
        "accumulation",
        "[training]\ngradient_accumulation_steps = 4",
        [],
        ["is not an option", "training.global_batch_size"],
    ),
    (
        "a name of data",
        "[training]\ndataset_name = 'c4'",
        [],
        ["is not an option", "training.dataset?"],
    ),
    (
        "a size elsewhere",
        "[training]\nvocab_size = 256",
        [],
        ["is not an option", "model.overrides.vocab_size"],
    ),
    ("a project", "[metrics]\nwandb_project = 'p'", [], ["is not an option", "WANDB_PROJECT"]),
    ("second file", "", ["other.toml"], ['"other.toml"', "is a second file"]),
    ("text for a number", "", ["--optimizer.lr", "fast"], ['lr="fast"', "must be a number"]),
    (
        "fraction as an argument",
        "",
        ["--training.steps=2.5"],
        ["training.steps", "must be an integer", "2 or 3"],
    ),
    (
        "word for a switch",
        "",
        ["--compile.enable=yes"],
        ["compile.enable", "must be true or false", "write true"],
    ),
    (
        "wrong word",
        "",
        ["--training.dtype", "bf16"],
        ["training.dtype", "bf16", '"float32", "bfloat16"'],
    ),
    (
        "negated non-boolean",
        "",
        ["--training.no_steps"],
        ["--training.no_steps", "is not an option"],
    ),
    (
        "list of lists as words",
        "",
        ["--parallelism.module_fqns_per_model_part", "a,b"],
        ["list of lists", "as TOML"],
    ),
    (
        "two files",
        "",
        ["--job.config_file", "nowhere/x.toml"],
        ["nowhere/x.toml", "is a second configuration file"],
    ),
]

CHECKING = [
    ("run folder without a name", "", ["--job.dump_folder="], ["is empty", "name a folder"]),
    (
        "run folder that is an address",
        "",
        ["--job.dump_folder=s3://b/run"],
        ["not an address", "checkpoint.folder"],
    ),
    (
        "no optimizer",
        '[optimizer]\nname = "adamw"',
        [],
        ['name="adamw"', "AdamW, Adam", 'did you mean "AdamW"?'],
    ),
    ("no steps", "[training]\nsteps = 0", [], ["training.steps=0", "at least 1"]),
    (
        "far too many steps",
        "[training]\nsteps = 1e13",
        [],
        ["steps=10000000000000", "at most 1000000000000"],
    ),
    (
        "a batch of everything",
        "[training]\nlocal_batch_size = 1e13",
        [],
        ["local_batch_size=", "at most 1000000000000"],
    ),
    (
        "endless",
        "[training]\nsteps = -1",
        [],
        ["training.steps=-1", "without end", "training.epochs"],
    ),
    ("no batch", "[training]\nlocal_batch_size = 0", [], ["local_batch_size=0", "at least 1"]),
    (
        "a folder as a dataset",
        '[training]\ndataset = "/"',
        [],
        ['training.dataset="/"', "set training.dataset_path to it"],
    ),
    ("a port", "[metrics]\nprometheus_port = 70000", [], ["prometheus_port=70000", "not a port"]),
    ("no log", "[metrics]\nlog_freq = 0", [], ["metrics.log_freq=0", "at least 1"]),
    ("no garbage collection", "[training]\ngc_freq = -1", [], ["gc_freq=-1", "at least 1"]),
    (
        "degree 0",
        "[parallelism]\ntensor_parallel_degree = 0",
        [],
        ["tensor_parallel_degree=0", "at least 1"],
    ),
    (
        "shard 0",
        "[parallelism]\ndata_parallel_shard_degree = 0",
        [],
        ["shard_degree=0", "at least 1, or -1"],
    ),
    (
        "replicate -1",
        "[parallelism]\ndata_parallel_replicate_degree = -1",
        [],
        ["replicate_degree=-1", "at least 1"],
    ),
    (
        "no interval",
        "[checkpoint]\nenable = true\ninterval = 0",
        [],
        ["checkpoint.interval=0", "at least 1"],
    ),
    ("negative rate", "[optimizer]\nlr = -1e-3", [], ["optimizer.lr=-0.001", "not be negative"]),
    ("infinite rate", "[optimizer]\nlr = inf", [], ["optimizer.lr=inf", "must be a finite number"]),
    ("beta of 1", "[optimizer]\nbeta1 = 1", [], ["optimizer.beta1=1.0", "below 1"]),
    ("no epsilon", "[optimizer]\neps = 0", [], ["optimizer.eps=0.0", "above 0"]),
    (
        "percent",
        "[lr_scheduler]\ndecay_ratio = 80",
        [],
        ["decay_ratio=80.0", "between 0 and 1", "10 % is 0.1"],
    ),
    (
        "minimum above the peak",
        "[lr_scheduler]\nmin_lr_factor = 1.5",
        [],
        ["min_lr_factor=1.5", "between 0 and 1"],
    ),
    ("no norm", "[training]\nmax_norm = 0", [], ["training.max_norm=0.0", "above 0"]),
    ("negative seed", "[debug]\nseed = -1", [], ["debug.seed=-1", "not be negative"]),
    (
        "one checkpoint",
        "[checkpoint]\nkeep_latest_k = 1",
        [],
        ["keep_latest_k=1", "only valid checkpoint", "0 for all"],
    ),
    (
        "load step -2",
        "[checkpoint]\nenable = true\nload_step = -2",
        [],
        ["load_step=-2", "-1 for the newest"],
    ),
    (
        "every 0-th layer",
        '[activation_checkpoint]\nselective_ac_option = "0"',
        [],
        ['="0"', '"op"'],
    ),
    (
        "unknown operation",
        '[activation_checkpoint]\nselective_ac_option = "ops"',
        [],
        ['="ops"', '"op"'],
    ),
    (
        "schedule's name",
        '[parallelism]\npipeline_parallel_schedule = "1f2b"',
        [],
        ['"1f2b"', "did you mean 1F1B?"],
    ),
    (
        "part of a checkpoint",
        '[checkpoint]\nexclude_from_loading = ["optim"]',
        [],
        ['"optim"', 'mean "optimizer"?'],
    ),
    ("one log of all ranks", '[metrics]\nsave_log_file = "log"', [], ["save_log_file", "{rank}"]),
    (
        "model",
        '[model]\nname = "lama3"',
        [],
        ['model.name="lama3"', "is not a model", "llama3?", "llama2, llama3"],
    ),
    ("model path", '[model]\nname = "no/such.py"', [], ["no/such.py", "is not a file"]),
    (
        "flavor",
        '[model]\nflavor = "8b"',
        [],
        ['flavor="8b"', "not a flavor of llama3", "mean 8B?", "debugmodel"],
    ),
    (
        "override",
        "[model.overrides]\nnum_layer = 2",
        [],
        ["run.toml:2", "num_layer=2", "not a field", "num_layers?"],
    ),
    (
        "override's type",
        "[model.overrides]\nnum_layers = 2.5",
        [],
        ["num_layers=2.5", "must be an integer"],
    ),
    (
        "override's sign",
        "[model.overrides]\nnum_layers = -2",
        [],
        ["num_layers=-2", "not be negative"],
    ),
    (
        "dataset",
        '[training]\ndataset = "python_stdlb"',
        [],
        ["python_stdlb", "not a dataset", "python_stdlib?"],
    ),
    (
        "heads",
        "[parallelism]\ntensor_parallel_degree = 16\n[model.overrides]\nnum_kv_heads = 8",
        [],
        [
            "tensor_parallel_degree=16",
            "does not divide the 8 KV heads of model llama3/debugmodel",
            "use 1, 2, 4 or 8",
        ],
    ),
    (
        "heads and vocabulary",
        "[parallelism]\ntensor_parallel_degree = 4\n[model.overrides]\nnum_kv_heads = 2\nvocab_size = 258",
        [],
        ["2 KV heads", "vocabulary of 258", "use 1 or 2"],
    ),
    (
        "sequence",
        "[parallelism]\ntensor_parallel_degree = 4\n[training]\nseq_len = 30",
        [],
        ["training.seq_len=30", "not a multiple of 4", "use 28 or 32"],
    ),
    (
        "sequence and context",
        "[parallelism]\ncontext_parallel_degree = 4\n[training]\nseq_len = 12",
        [],
        ["training.seq_len=12", "not a multiple of 8", "use 8 or 16"],
    ),
    (
        "layers",
        "[parallelism]\npipeline_parallel_degree = 8",
        [],
        ["degree=8", "6 layers", "at most 6"],
    ),
    (
        "global batch",
        "[training]\nglobal_batch_size = 12",
        [],
        ["global_batch_size=12", "multiple", "use 8 or 16, or -1"],
    ),
    (
        "global batch over ranks",
        "[training]\nglobal_batch_size = 8\n[parallelism]\ndata_parallel_shard_degree = 2",
        [],
        ["global_batch_size=8", "local_batch_size 8 times 2", "use 16"],
    ),
    (
        "steps and epochs",
        "[training]\nsteps = 5\nepochs = 1",
        [],
        ["training.steps=5", "training.epochs", "one of the two"],
    ),
    (
        "two half precisions",
        '[training]\ndtype = "bfloat16"\nmixed_precision_param = "float16"',
        [],
        ["mixed_precision_param", "cannot compute in float16"],
    ),
    (
        "loss scale",
        "[training]\ninitial_loss_scale = 1024.0",
        [],
        ["initial_loss_scale", "without float16"],
    ),
    (
        "skips",
        "[training]\nnonfinite_max_skips = 3",
        [],
        ["nonfinite_max_skips=3", "nonfinite_policy"],
    ),
    (
        "sharded state of one copy",
        "[parallelism]\nshard_optimizer_states = true",
        [],
        ["requires replicas of the model"],
    ),
    (
        "sharded state off the device",
        "[parallelism]\nshard_optimizer_states = true\ndata_parallel_replicate_degree = 2\n"
        "[training]\nenable_cpu_offload = true",
        [],
        ["shard_optimizer_states", "enable_cpu_offload"],
    ),
    (
        "memory budget",
        '[activation_checkpoint]\nmode = "memory_budget"',
        [],
        ["requires the compiler", "compile.enable"],
    ),
    (
        "debugging operation-wise recomputation",
        '[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"\ndebug = true',
        [],
        ["activation_checkpoint.debug", "recomputation of entire layers"],
    ),
    (
        "debugging repeated recomputation",
        '[activation_checkpoint]\nmode = "full"\ndebug = true',
        [
            "--parallelism.pipeline_parallel_degree=2",
            "--parallelism.pipeline_parallel_schedule=DualPipeV",
        ],
        ["activation_checkpoint.debug", "splits the backward"],
    ),
    (
        "debugging compiled recomputation",
        '[activation_checkpoint]\nmode = "full"\ndebug = true',
        ["--compile.enable"],
        ["activation_checkpoint.debug", "eager layers", "compile.enable = false"],
    ),
    (
        "budget without its mode",
        "[activation_checkpoint]\nmemory_budget = 0.7",
        [],
        ["memory_budget=0.7", "no effect"],
    ),
    (
        "budget curve",
        "[activation_checkpoint]\nvisualize_memory_budget_pareto = true",
        [],
        ["visualize_memory_budget_pareto", 'mode = "memory_budget"'],
    ),
    (
        "offloaded activations",
        '[activation_checkpoint]\nmode = "none"\ncpu_offload = true',
        [],
        ["activation_checkpoint.cpu_offload", "recomputed"],
    ),
    (
        "async without the compiler",
        "[parallelism]\nenable_async_tensor_parallel = true\ntensor_parallel_degree = 2",
        [],
        ["enable_async_tensor_parallel", "requires the compiler"],
    ),
    (
        "experts",
        "[parallelism]\nexpert_tensor_parallel_degree = 2",
        [],
        ["must be 1 or tensor_parallel_degree"],
    ),
    (
        "pipeline batch",
        "[parallelism]\npipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 3",
        [],
        ["microbatch_size=3", "does not divide training.local_batch_size"],
    ),
    (
        "warn only",
        "[debug]\ndeterministic_warn_only = true",
        [],
        ["deterministic_warn_only", "debug.deterministic = true"],
    ),
    (
        "load step without checkpoints",
        "[checkpoint]\nload_step = 5",
        [],
        ["load_step=5", "checkpoint.enable = true"],
    ),
    (
        "seed without checkpoints",
        "[checkpoint]\ncreate_seed_checkpoint = true",
        [],
        ["requires checkpoint.enable"],
    ),
    (
        "load only without checkpoints",
        "[checkpoint]\nload_only = true",
        [],
        ["checkpoint.load_only", "are off"],
    ),
    (
        "start without checkpoints",
        '[checkpoint]\ninitial_load_path = "x"',
        [],
        ["initial_load_path", "are off"],
    ),
    (
        "nothing to compile",
        "[compile]\nenable = true\ncomponents = []",
        [],
        ["compile.components=[]", "must not be empty"],
    ),
    (
        "crowded trace",
        "[profiling]\nenable_profiling = true\nprofile_freq = 3",
        [],
        ["profile_freq=3", "profiler_warmup plus profiler_active"],
    ),
    (
        "no workers to keep",
        "[training.dataloader]\npersistent_workers = true",
        [],
        ["requires workers", "num_workers"],
    ),
    (
        "no workers to prefetch",
        "[training.dataloader]\nprefetch_factor = 2",
        [],
        ["prefetch_factor=2", "requires workers"],
    ),
    (
        "decay of another schedule",
        '[lr_scheduler]\nname = "deepspeed_warmup"\ndecay_ratio = 0.5',
        [],
        ["decay_ratio=0.5", "no effect", "warmup_stable_decay"],
    ),
    (
        "warmup of another schedule",
        '[lr_scheduler]\nname = "linear_by_proportion"\nwarmup_steps = 5',
        [],
        ["warmup_steps=5", "no effect with lr_scheduler.name = linear_by_proportion"],
    ),
    (
        "two tokenizers",
        '[model]\nhf_assets_path = "a"\ntokenizer_path = "b"',
        [],
        ["hf_assets_path", "one of the two"],
    ),
    (
        "from the command line",
        "",
        ["--training.steps", "0"],
        ["command line: training.steps=0", "at least 1"],
    ),
]


def read(tmp_path: Path, text: str, arguments: list[str]) -> Loaded:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return load(file, arguments)


def expect_one(problems: list[object], fragments: list[str]) -> None:
    assert len(problems) == 1, [str(problem) for problem in problems]
    line = str(problems[0])
    assert "\n" not in line
    for fragment in fragments:
        assert fragment in line, line


@pytest.mark.parametrize(
    ("text", "arguments", "fragments"), [c[1:] for c in READING], ids=[c[0] for c in READING]
)
def test_an_unreadable_value_is_one_problem_with_a_fix(
    tmp_path: Path, text: str, arguments: list[str], fragments: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, arguments)
    expect_one(list(caught.value.problems), fragments)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "arguments", "fragments"), [c[1:] for c in CHECKING], ids=[c[0] for c in CHECKING]
)
def test_an_impossible_value_is_one_problem_with_a_fix(
    tmp_path: Path, text: str, arguments: list[str], fragments: list[str]
) -> None:
    expect_one(list(check(read(tmp_path, text, arguments))), fragments)


def test_all_problems_of_file_and_command_line_are_reported_together(tmp_path: Path) -> None:
    text = '[training]\nsetps = 3\nsteps = 1.5\n[optimzer]\nlr = 1\n[optimizer]\nimplementation = "no"\n'
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text, ["--training.seq-lenn", "1", "--optimizer.lr=x"])

    lines = str(caught.value).splitlines()
    assert len(lines) == 6
    for option in (
        "setps",
        "training.steps",
        "[optimzer]",
        "optimizer.implementation",
        "--training.seq_lenn",
        "optimizer.lr",
    ):
        assert any(option in line for line in lines), option


def test_a_broken_file_does_not_hide_problems_of_the_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, "[training", ["--training.stepz=1"])
    assert len(caught.value.problems) == 2


def test_all_rules_report_together(tmp_path: Path) -> None:
    text = "[training]\nsteps = 0\nseq_len = 0\n[optimizer]\nlr = -1\n[checkpoint]\nkeep_latest_k = 1\n"
    problems = check(read(tmp_path, text, []))
    assert [p.option for p in problems] == [
        "training.steps",
        "training.seq_len",
        "optimizer.lr",
        "checkpoint.keep_latest_k",
    ]
    assert [p.where for p in problems] == ["run.toml:2", "run.toml:3", "run.toml:5", "run.toml:7"]


def test_a_missing_file_names_the_nearest_and_a_folder_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "debug.toml").write_text("")
    with pytest.raises(ConfigError, match=r"does not exist; did you mean .*debug\.toml\?"):
        load(tmp_path / "debgu.toml")
    with pytest.raises(ConfigError, match="is a folder; name the TOML file in it"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="the folder .* does not exist"):
        load(tmp_path / "nowhere" / "run.toml")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load(tmp_path / "run.toml")


def test_hints_for_foreign_options_name_existing_options() -> None:
    known = {
        *options.options(),
        *(f"model.overrides.{size}" for size in model_shape(load("debug")) or ()),
        *(f"model.overrides.{field.name}" for field in dataclasses.fields(deepseek_v3.Config)),
    }
    for foreign, fix in options._WAYS.items():
        assert foreign not in options.options(), "this is an option now, and needs no hint"
        named = re.findall(r"(?:[a-z_]+\.)+[a-z_]\w*", fix)
        assert named or "--" in fix or "environment" in fix or fix.startswith("remove it: "), fix
        assert {name for name in named if name not in {"quantize.linear.float8"}} <= known, (
            foreign,
            fix,
        )
