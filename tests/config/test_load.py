from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shardtrain.config import Config, ConfigError, load, presets
from shardtrain.config.command_line import split
from shardtrain.launch.job import to_job

ROOT = Path(__file__).parents[2]


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return file


def test_command_line_beats_file_beats_default(tmp_path: Path) -> None:
    file = write(tmp_path, "[training]\nsteps = 50\nseq_len = 64\nlocal_batch_size = 2\n")
    loaded = load(file, ["--training.seq_len", "128"])
    training = loaded.config.training

    assert (training.steps, training.seq_len, training.local_batch_size) == (50, 128, 2)
    assert training.max_norm == Config().training.max_norm
    assert loaded.config.optimizer == Config().optimizer
    assert loaded.origins["training.steps"] == "run.toml:2"
    assert loaded.origins["training.seq_len"] == "command line"
    assert loaded.origins["training.max_norm"] == "default"


def test_no_arguments_are_the_default_config() -> None:
    loaded = load(None)
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.notices == ()
    assert loaded.path is None


def test_without_a_file_the_preset_is_used_and_reported() -> None:
    loaded = load(None, ["--training.steps", "5"], preset=presets.FIRST)
    assert loaded.config == load(ROOT / "configs/debug.toml", ["--training.steps", "5"]).config
    assert "no configuration is named" in loaded.notices[0]
    assert "llama3_8b" in loaded.notices[0]
    for named in (
        load("llama3_8b", preset=presets.FIRST),
        load(None, ["--job.config_file", "llama3_8b"], preset="x"),
    ):
        assert named.config.model == load(ROOT / "configs/llama3_8b.toml").config.model
        assert named.notices == ()


def test_every_preset_has_a_name() -> None:
    assert presets.names() == sorted(file.stem for file in (ROOT / "configs").glob("*.toml"))
    assert load("defaults").config == Config()
    with pytest.raises(
        ConfigError,
        match=r"job.config_file=.*llama3_8.*did you mean llama3_8b\? presets are debug, ",
    ):
        load("llama3_8")


@pytest.mark.parametrize("name", presets.names())
def test_a_file_in_the_current_directory_never_replaces_a_preset(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted configuration could run code, because it may name a Python file as its model."""
    monkeypatch.chdir(tmp_path)
    planted = tmp_path / name
    planted.write_text("[training]\nsteps = 7\n")
    refused = f'job.config_file="{name}" is the name of a preset and of a file in this folder'

    for read in (
        lambda: load(name),
        lambda: load(f"./{name}"),
        lambda: load(None, ["--job.config_file", name]),
    ):
        with pytest.raises(ConfigError, match=refused):
            read()
    # ``preset=`` always selects the preset, and an absolute path always selects the file.
    assert load(None, preset=name).path == presets.file_of(name)
    assert load(planted).config.training.steps == 7

    # Only a file can be a configuration, so a folder with the name of a preset is not ambiguous.
    planted.unlink()
    planted.mkdir()
    assert load(name).path == presets.file_of(name)


def test_another_machine_gets_a_presets_name() -> None:
    job = to_job(load("debug"), ())
    assert list(job.command[1:6]) == ["-P", "-m", "shardtrain", "train", "debug"]


def test_an_option_may_name_the_file_and_a_second_file_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "[training]\nsteps = 7\n")
    for path, arguments in (
        (str(file), ["--job.config_file", str(file)]),
        (None, [f"--job.config-file={file}"]),
    ):
        loaded = load(path, arguments)
        assert loaded.config.training.steps == 7
        assert loaded.path == file

    for read in (
        lambda arguments: load("a.toml", arguments),
        lambda arguments: split(["a.toml", *arguments]),
    ):
        with pytest.raises(
            ConfigError,
            match=r'job.config_file="b.toml" is a second configuration file, in addition to a.toml; use one',
        ):
            read(["--training.steps", "3", "--job.config_file", "b.toml"])


@pytest.mark.parametrize(
    ("arguments", "option", "value"),
    [
        (["--training.steps", "5"], "training.steps", 5),
        (["--training.steps=5"], "training.steps", 5),
        (["--training.steps=1e3"], "training.steps", 1000),
        (["--training.global-batch-size", "-1"], "training.global_batch_size", -1),
        (["--optimizer.lr", "3e-4"], "optimizer.lr", 3e-4),
        (["--optimizer.lr", "1"], "optimizer.lr", 1.0),
        (["--training.max_norm=inf"], "training.max_norm", float("inf")),
        (["--compile.enable"], "compile.enable", True),
        (["--compile.enable", "false"], "compile.enable", False),
        (["--compile.enable=True"], "compile.enable", True),
        (["--compile.no_enable"], "compile.enable", False),
        (
            ["--activation_checkpoint.no-preserve-rng-state"],
            "activation_checkpoint.preserve_rng_state",
            False,
        ),
        (["--compile.no_enable=false"], "compile.enable", True),
        (["--job.description", "2"], "job.description", "2"),
        (["--job.description=--odd"], "job.description", "--odd"),
        (["--job.description="], "job.description", ""),
        (
            ["--activation_checkpoint.selective_ac_option", "2"],
            "activation_checkpoint.selective_ac_option",
            "2",
        ),
        (["--training.dtype", "bfloat16"], "training.dtype", "bfloat16"),
        (["--training.epochs", "None"], "training.epochs", None),
        (["--training.epochs", "2"], "training.epochs", 2),
        (["--training.dataset_path", "none"], "training.dataset_path", None),
        (["--training.dataloader.num_workers", "2"], "training.dataloader.num_workers", 2),
        (["--optimizer.no_weight_decay", "a,b"], "optimizer.no_weight_decay", ["a", "b"]),
        (["--optimizer.no_weight_decay", "a", "b"], "optimizer.no_weight_decay", ["a", "b"]),
        (["--optimizer.no_weight_decay="], "optimizer.no_weight_decay", []),
        (
            ["--optimizer.no_weight_decay", '["*,x", "b"]'],
            "optimizer.no_weight_decay",
            ["*,x", "b"],
        ),
        (["--compile.components", "loss"], "compile.components", ["loss"]),
        (
            ["--parallelism.module_fqns_per_model_part", '[["a", "b"], ["c"]]'],
            "parallelism.module_fqns_per_model_part",
            [["a", "b"], ["c"]],
        ),
        (["--model.overrides.num_layers", "4"], "model.overrides", {"num_layers": 4}),
        (["--model.overrides.num-layers=4"], "model.overrides", {"num_layers": 4}),
        (["--model.overrides", "{dim = 8, x = true}"], "model.overrides", {"dim": 8, "x": True}),
        (
            ["--model.overrides.norm_eps", "1e-6", "--model.overrides.rope_scaling", "none"],
            "model.overrides",
            {"norm_eps": 1e-6, "rope_scaling": "none"},
        ),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) and v and str(v[0]).startswith("--") else None,
)
def test_an_argument_sets_its_option(arguments: list[str], option: str, value: object) -> None:
    loaded = load(None, arguments)
    got = loaded.value(option)
    assert got == value
    assert type(got) is type(value)
    assert loaded.origins[option] == "command line"

    options_set = {name for name in loaded.origins if loaded.is_set(name)}
    overrides = {name for name in options_set if name.startswith("model.overrides.")}
    assert options_set - overrides == {option}


def test_a_switch_does_not_take_the_next_option_for_its_value() -> None:
    config = load(
        None, ["--compile.enable", "--training.steps", "1", "--debug.deterministic"]
    ).config

    assert (config.compile.enable, config.training.steps, config.debug.deterministic) == (
        True,
        1,
        True,
    )


def test_an_integer_may_be_written_as_an_integral_float_and_a_float_as_an_integer(
    tmp_path: Path,
) -> None:
    config = load(write(tmp_path, "[training]\nsteps = 1e6\nmax_norm = 1\n")).config.training
    assert config.steps == 1_000_000
    assert type(config.steps) is int
    assert config.max_norm == 1.0
    assert type(config.max_norm) is float


def test_overrides_of_file_and_command_line_join_key_by_key(tmp_path: Path) -> None:
    file = write(tmp_path, "[model]\noverrides = {dim = 64, num_layers = 2}\n")
    loaded = load(file, ["--model.overrides.num_layers", "4"])
    assert loaded.config.model.overrides == {"dim": 64, "num_layers": 4}
    assert loaded.origins["model.overrides.dim"] == "run.toml:2"
    assert loaded.origins["model.overrides.num_layers"] == "command line"


LAYOUTS = """\
# a comment with [brackets] and key = 1
title.ignored = 1   # line 2: no option, reported below
[ "training" ]   # quoted section
"steps" = 5
'seq_len' = 6
dataset = '''
[optimizer]
lr = 3'''
dataloader.num_workers = 0
dataloader = 3
[model]
overrides.num_layers = 2
converters = [ # comment ]
  "a",
  "}, b = 1",
]
flavor = "x\\"] # no comment"
[quantize]
linear = { float8 = { emulate = true, filter_fqns = ["x"] }, mx.recipe_name = "mxfp8_cublas_rceil" }
"""


def test_origins_are_lines_in_any_toml_notation(tmp_path: Path) -> None:
    text = "\n".join(line for line in LAYOUTS.splitlines() if not line.startswith("dataloader = 3"))
    text = text.replace("title.ignored = 1 ", "")
    origins = load(write(tmp_path, text)).origins
    expected = {
        "training.steps": 4,
        "training.seq_len": 5,
        "training.dataset": 6,
        "training.dataloader.num_workers": 9,
        "model.overrides.num_layers": 11,
        "model.converters": 12,
        "model.flavor": 16,
        "quantize.linear.float8.emulate": 18,
        "quantize.linear.float8.filter_fqns": 18,
        "quantize.linear.mx.recipe_name": 18,
    }

    assert {name: f"run.toml:{line}" for name, line in expected.items()} == {
        name: origin for name, origin in origins.items() if name in expected
    }
    assert origins["optimizer.lr"] == "default"


def test_windows_line_ends_and_a_byte_order_mark_are_accepted(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbf[training]\r\n\r\nsteps = 5\r\n")
    assert load(file).origins["training.steps"] == "run.toml:3"


def test_loading_twice_gives_equal_configs_that_share_no_list(tmp_path: Path) -> None:
    first = load(None).config
    second = load(None).config
    assert first == second
    assert first.compile.components is not second.compile.components


def test_load_and_check_never_import_torch(tmp_path: Path) -> None:
    file = write(tmp_path, "[training]\nsteps = 5\n")
    code = (
        "import sys; from shardtrain.config import load, check, show, machine_notes, unavailable; "
        f"l = load({str(file)!r}, ['--training.seq_len=32']); assert check(l) == []; show(l); unavailable(l); "
        "machine_notes(l, 2, 'cpu', 0); print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert result.stdout.split() == ["False", "False"]


def test_a_config_error_loads_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load(write(tmp_path, "[training]\nsteps = 5\nwrong = 1\n"))
