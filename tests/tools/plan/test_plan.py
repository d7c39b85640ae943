"""``shardtrain plan``: its output fits a terminal and names the bottleneck, and ``train`` accepts the best mesh."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import patience
import pytest

import shardtrain
from shardtrain import cli, config
from shardtrain.facts.quantization import LINEAR
from shardtrain.tools.plan import hardware, picture, planning, search
from shardtrain.utils.errors import ConfigError


def answer(capsys, *arguments):
    code = cli.main(("plan", *arguments))
    out, err = capsys.readouterr()
    return code, out, err


def test_the_output_fits_a_screen_and_names_memory_time_and_bottleneck(capsys):
    code, out, err = answer(capsys, "llama3_8b", "--gpus", "8", "--tokens", "1T", "--price", "2")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    for part in (
        "8.03B parameters on 8 x h100",
        "activations",
        "MFU",
        "changes that reduce",
        "device hours",
        "fits: ",
    ):
        assert part in out


@pytest.mark.nightly(
    "it plans 405B",
    by="tests/tools/plan/test_plan.py::test_the_output_fits_a_screen_and_names_memory_time_and_bottleneck",
)
def test_the_page_shows_the_output_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "plan.md").read_text()
    command, printed = re.findall(
        r"`shardtrain (plan [^`]+)`:\n\n```text\n(.*?)```", page, re.DOTALL
    )[0]
    assert cli.main(shlex.split(command)) == 0
    assert capsys.readouterr().out == printed


def test_on_a_narrow_terminal_no_line_is_wider() -> None:
    loaded = config.load(
        "llama3_405b", ["--parallelism.pipeline_parallel_degree=8", "--training.local_batch_size=8"]
    )
    device = hardware.find("h100")
    plan = planning.make(loaded.config, 512, device)
    for columns in (60, 70, 80):
        text = picture.lines(plan, 15e12, 2.5, 7000.0, columns)
        assert max(map(len, text)) <= columns, columns
        assert any(line.startswith("  pp 7") for line in text), columns
    search_result = search.run(config.load("debug"), 2, hardware.find("cpu"))

    assert max(map(len, search.lines(search_result, 3, 60))) <= 60


def test_json_is_one_object_with_bytes_and_seconds(capsys):
    code, out, _ = answer(capsys, "llama3_8b", "--nodes", "2", "--device", "h200", "--json")
    plan = json.loads(out)
    assert (code, plan["world_size"], plan["device"]) == (0, 16, "h200")
    assert (
        plan["peak_bytes"] == max(rank["peak"] for rank in plan["ranks"]) + plan["overhead_bytes"]
    )
    assert sum(plan["costs_seconds"].values()) == pytest.approx(plan["step_seconds"])


def test_snapshots_count_as_host_memory(capsys):
    """A snapshot has float32 weights and two moments of 8 B parameters.

    One node stores two generations of the full state. Each of two nodes stores two generations of its
    own half and of the other node's half, so the bytes per node are equal.
    """
    options = ["llama3_8b", "--checkpoint.enable", "--checkpoint.snapshot_interval", "1"]
    bytes_per_node = {}
    for nodes in (1, 2):
        _, out, _ = answer(capsys, *options, "--nodes", str(nodes), "--device", "h200", "--json")
        bytes_per_node[nodes] = json.loads(out)["snapshot_bytes_per_node"]

    assert bytes_per_node[1] == pytest.approx(2 * 12 * 8.03e9, rel=0.01)
    assert bytes_per_node[2] == pytest.approx(bytes_per_node[1], rel=0.01)

    # The text of a plan mentions snapshots only if the run takes some.
    _, out, _ = answer(capsys, *options, "--nodes", "2", "--device", "h200")
    assert "of host memory on each node (checkpoint.snapshot_interval)" in out
    _, out, _ = answer(capsys, "llama3_8b", "--nodes", "2", "--device", "h200")
    assert "snapshot" not in out


def test_an_oversized_plan_reports_the_excess_and_a_fix(capsys):
    code, out, _ = answer(capsys, "llama3_70b", "--gpus", "8", "--device", "a100-40")
    assert code == 2
    assert "does not fit" in out
    assert "too much; possible changes" in out

    plan = shardtrain.plan("llama3_70b", gpus=8, device="a100-40")
    assert not plan.fits
    assert 1 <= len(plan.fixes) <= 3


def test_the_python_api_returns_the_numbers_of_the_command(capsys):
    plan = shardtrain.plan("llama3_8b", {"activation_checkpoint.mode": "full"}, gpus=8)
    _, out, _ = answer(
        capsys, "llama3_8b", "--gpus", "8", "--json", "--activation_checkpoint.mode", "full"
    )
    assert plan.as_dict() == json.loads(out)
    assert plan.tokens_per_second == pytest.approx(8 * plan.tps)
    assert 0 < plan.mfu < 1
    for gpus in (0, -8, 10**9):
        with pytest.raises(ConfigError, match=r"gpus=-?\d+ must be an integer from 1 to 1000000"):
            shardtrain.plan("llama3_8b", gpus=gpus)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "0"), "--gpus"),
        (("--gpus", "many"), "--gpus"),
        (("--gpus", "8", "--nodes", "1"), "--nodes"),
        (("--device", "tpu"), "not a known device"),
        (("--tokens", "lots"), "--tokens"),
        (("--nproc", "2"), "use --gpus"),
        (("--float8",), "has no effect without --search"),
        (("-o", "best.toml"), "has no effect without --search"),
        (("--price", "2"), "has no effect without --tokens"),
        (("--search", "--largest"), "--largest is for one configuration"),
        (("--gpus", "8", "--parallelism.tensor_parallel_degree", "3"), "tensor_parallel_degree=3"),
    ],
)
def test_wrong_plan_arguments_are_rejected_in_one_line_each(capsys, arguments, message):
    code, out, err = answer(capsys, "llama3_8b", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert all(line.startswith("error[2]") for line in err.splitlines())


@pytest.mark.parametrize(
    ("output", "message"),
    [("mine.toml", "is the configuration that is planned"), (".", "is a folder")],
)
def test_an_output_that_must_not_be_written_is_rejected_before_the_search(
    tmp_path, monkeypatch, capsys, output, message
):
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n')
    monkeypatch.setattr(search, "run", None)
    code, out, err = answer(capsys, "./mine.toml", "--gpus", "8", "--search", "-o", output)

    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert "8B" in Path("mine.toml").read_text()


def test_recomputing_costs_time_and_saves_memory():

    def planned(mode):
        return shardtrain.plan("llama3_8b", {"activation_checkpoint.mode": mode}, gpus=8)

    none = planned("none")
    op = planned("selective")
    full = planned("full")
    assert none.peak_bytes > op.peak_bytes > full.peak_bytes
    assert none.time.seconds < op.time.seconds < full.time.seconds


def test_sums_on_the_host_grow_with_the_logarithm_of_the_ranks():
    costs = {}
    for gpus in (1, 1024, 16_384):
        plan = shardtrain.plan("llama3_8b", gpus=gpus)
        costs[gpus] = plan.time.costs.get("sums on the host", 0.0)
    # 10 and 14 sequential messages (log2 of the ranks), 30 microseconds each
    assert list(costs.values()) == pytest.approx([0.0, 300e-6, 420e-6])


def test_tensor_parallelism_within_a_node_costs_less_than_across_nodes():
    device = hardware.find("h100")
    loaded = config.load("llama3_8b", ["--parallelism.tensor_parallel_degree", "8"]).config
    inside = planning.make(loaded, 16, device)
    across = planning.make(loaded, 16, replace(device, devices_per_node=4))
    assert across.time.costs["tensor parallel"] > 2 * inside.time.costs["tensor parallel"]


def test_the_best_of_a_search_is_no_slower_and_accepted_by_train(tmp_path):
    loaded = config.load("llama3_8b", [])
    device = hardware.find("h100")
    search_result = search.run(loaded, 16, device)
    best = search_result.ranked[0]
    requested = planning.make(loaded.config, 16, device)

    assert best.plan.tps >= requested.tps
    assert best.plan.fits
    assert best.plan.job.tokens_per_step == requested.job.tokens_per_step

    speeds = [candidate.plan.tps for candidate in search_result.ranked]
    assert speeds == sorted(speeds, reverse=True)
    path = tmp_path / "best.toml"
    path.write_text(search.as_toml(loaded, best))
    again = config.load(str(path), [])
    config.require_to_build(again, 16)

    assert planning.make(again.config, 16, device).as_dict() == best.plan.as_dict()

    text = search.lines(search_result, 3)
    assert max(map(len, text)) <= 80
    assert any("runner-up" in line for line in text)


@pytest.mark.nightly("searches and traces of models up to 405B")
@pytest.mark.parametrize(
    ("preset", "world_size", "device"),
    [
        ("llama3_1b", 8, "h100"),
        ("llama2_7b", 16, "a100"),
        ("llama3_70b", 64, "h200"),
        ("debug_moe", 8, "l40s"),
        ("llama3_405b", 512, "h100"),
    ],
)
def test_the_best_of_a_search_is_trained_as_a_dry_run_on_as_many_ranks(
    preset, world_size, device, tmp_path
):
    path = tmp_path / "best.toml"
    arguments = [preset, "--gpus", str(world_size), "--device", device, "--search", "-o", str(path)]
    assert cli.main(["plan", *arguments]) == 0

    text = tmp_path / "text"
    text.mkdir()
    (text / "a.txt").write_text("a text " * 100)
    command = [sys.executable, "-m", "shardtrain", "train", str(path), "--nproc", str(world_size)]
    command += ["--comm.mode", "fake_backend", "--job.dump_folder", str(tmp_path / "run")]
    command += ["--model.hf_assets_path", "bytes", "--training.dataset_path", str(text)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=patience.seconds(1800))

    assert result.returncode == 0, result.stderr[-2000:]
    assert "GiB" in result.stdout + result.stderr


def test_a_search_on_devices_that_are_too_small_reports_the_closest_plan(capsys):
    code, out, _ = answer(capsys, "llama3_405b", "--gpus", "8", "--search")
    assert code == 2
    assert "no candidate fits; the closest one needs" in out


def test_an_unknown_peak_is_refused(tmp_path):
    path = tmp_path / "old.toml"
    path.write_text(
        "[devices.old]\nmemory_gib = 16\nmemory_bytes_per_second = 9e11\ndevices_per_node = 8\n"
        'link = "pcie4"\nnetwork = "ethernet-10g"\nsource = "a box"\n[devices.old.flops]\nfloat16 = 1e14\n'
    )

    with pytest.raises(ConfigError, match="bfloat16"):
        shardtrain.plan("llama3_8b", gpus=8, device=str(path))


@pytest.mark.parametrize(
    "name", ["GPipe", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_every_schedule_is_planned(name):
    options = {
        "compile.enable": False,
        "parallelism.pipeline_parallel_degree": 4,
        "training.local_batch_size": 16,
        "parallelism.pipeline_parallel_schedule": name,
    }
    plan = shardtrain.plan("llama3_8b", options, gpus=16)

    assert len(plan.ranks) == 4
    assert 0 < plan.time.bubble < 0.5
    assert plan.time.costs["pipeline bubble and sends"] > 0


@pytest.mark.parametrize(("name", "world_size"), [("llama3_8b", 8), ("llama3_70b", 8)])
def test_the_largest_fits_and_a_little_more_does_not(name, world_size):
    device = hardware.find("h100")
    loaded = config.load(name)
    largest = planning.largest(loaded.config, world_size, device)
    now = planning.make(loaded.config, world_size, device)

    if not now.fits:  # even one row does not fit, so no batch size fits
        assert largest["training.local_batch_size"] == 0

    for option, number in largest.items():
        for times, fits in ((1, True), (1.05, False)):
            value = max(number + (times > 1), int(number * times))
            section, key = option.rsplit(".", 1)
            if section == "training" and number:
                if key == "seq_len":
                    value += -value % 128
                plan = planning.make(
                    config.load(name, [f"--{option}={value}"]).config, world_size, device
                )
                assert plan.fits == fits, (option, value)


def test_the_largest_values_of_a_layout_are_reported_on_request(capsys):
    code, out, _ = answer(capsys, "llama3_8b", "--gpus", "8", "--largest")
    assert code == 0
    limits = dict(
        line.strip().split("=")
        for line in out.partition("if only one is changed:\n")[2].splitlines()
    )
    assert set(limits) == {
        "training.seq_len",
        "training.local_batch_size",
        "model.overrides.num_layers",
    }
    assert int(limits["training.seq_len"]) > 8192
    assert int(limits["model.overrides.num_layers"]) > 32

    code, out, _ = answer(capsys, "llama3_8b", "--gpus", "8", "--largest", "--json")
    assert json.loads(out)["largest"] == {option: int(number) for option, number in limits.items()}


def test_failures_cost_half_an_interval_and_a_restart_each(capsys):
    arguments = ["plan", "llama3_8b", "--gpus", "1024", "--tokens", "15T"]
    budgets = {}
    for interval in (100, 1000):
        assert cli.main([*arguments, "--checkpoint.interval", str(interval), "--json"]) == 0
        budgets[interval] = json.loads(capsys.readouterr().out)["budget"]
    often = budgets[100]
    rarely = budgets[1000]

    assert (
        often["days"] == rarely["days"] < often["days_with_failures"] < rarely["days_with_failures"]
    )

    lost = rarely["seconds_between_saves"] / 2 + 600
    gained = rarely["days_with_failures"] - rarely["days"]
    assert rarely["failures"] * lost / 86400 == pytest.approx(gained, rel=1e-9)
    # One failure in 50,677 device hours is the assumed failure rate.
    assert rarely["failures"] == pytest.approx(
        1024 * rarely["days_with_failures"] * 24 / 50677, rel=1e-3
    )
    assert cli.main(arguments) == 0
    assert "one failure in 50,677 device hours" in " ".join(capsys.readouterr().out.split())
    assert cli.main([*arguments, "--checkpoint.enable=false"]) == 0
    assert "no checkpoint is saved" in capsys.readouterr().out
    assert (
        cli.main(
            [
                *arguments,
                "--checkpoint.interval_type",
                "seconds",
                "--checkpoint.interval",
                "1000000",
            ]
        )
        == 0
    )
    assert "training never ends with failures: save more often" in capsys.readouterr().out


@pytest.mark.nightly(
    "three searches",
    by="tests/tools/plan/test_plan.py::test_the_best_of_a_search_is_no_slower_and_accepted_by_train",
)
def test_float8_is_searched_if_requested_and_supported_by_the_device(tmp_path, capsys):
    arguments = ["plan", "llama3_8b", "--gpus", "8", "--search", "--top", "40", "--json"]
    assert cli.main(arguments) == 0
    plain = json.loads(capsys.readouterr().out)
    assert cli.main([*arguments, "--float8"]) == 0

    both = json.loads(capsys.readouterr().out)
    assert both["counted"] == 2 * plain["counted"]
    assert not any("model.converters" in candidate["options"] for candidate in plain["ranked"])
    assert both["ranked"][0]["options"]["model.converters"] == [LINEAR]
    assert both["ranked"][0]["tokens_per_second"] > plain["ranked"][0]["tokens_per_second"]

    code, _, err = answer(
        capsys, "llama3_8b", "--gpus", "8", "--search", "--float8", "--device", "a100"
    )
    assert code == 2
    assert "has no float8 products" in err


@pytest.mark.parametrize(
    ("task", "has_rows"), [("preference", True), ("reward_model", True), ("language_model", False)]
)
def test_plan_and_dry_run_report_the_assumed_row_length(
    capsys, monkeypatch, tmp_path, task, has_rows
):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    note = f'every sequence of task.name="{task}" is counted as training.seq_len=64 tokens'
    arguments = [
        f"--task.name={task}",
        "--training.seq_len=64",
        "--training.dataset=jsonl",
        f"--training.dataset_path={tmp_path}",
    ]

    for verb in (["plan", "debug"], ["train", "debug", "--comm.mode=fake_backend", "--nproc", "2"]):
        assert cli.main([*verb, *arguments]) == 0
        assert (note in " ".join(capsys.readouterr().out.split())) == has_rows


def test_mx_counts_as_float8_if_supported_and_emulation_is_noted(capsys):
    arguments = ["plan", "llama3_8b", "--gpus", "8", "--device", "b200", "--json"]
    plans = {}
    for name in ("", "quantize.linear.float8", "quantize.linear.mx", "emulated"):
        converter = "quantize.linear.mx" if name == "emulated" else name
        options = [f"--model.converters={converter}"] if converter else []
        options += ["--quantize.linear.mx.recipe_name=mxfp8_emulated"] if name == "emulated" else []
        # Convert the same layers as float8: clear the filter, because the preset keeps no layer in bfloat16.
        options += ["--quantize.linear.mx.filter_fqns="] if converter.endswith("mx") else []
        assert cli.main([*arguments, *options]) == 0
        plans[name] = json.loads(capsys.readouterr().out)
    speed = {name: plan["tokens_per_second"] for name, plan in plans.items()}

    assert speed["quantize.linear.mx"] == speed["quantize.linear.float8"] > speed[""]
    assert speed["emulated"] < speed["quantize.linear.mx"]
    assert "MX is counted as float8" in "".join(plans["quantize.linear.mx"]["notes"])
    assert "MX is emulated, which is slower" in "".join(plans["emulated"]["notes"])


SLURM = ["launch", "slurm", "--dry-run", "--launch.nodes", "2", "--launch.devices_per_node", "8"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["llama3_70b", "--launch.device", "a100-40gb"],
            'launch.device="a100-40gb" has 39.40 GiB, but each of 16 ranks is planned to need',
        ),
        (
            ["llama3_8b", "--launch.device", "h1000"],
            'launch.device="h1000" is not a known device; did you mean h100',
        ),
    ],
)
def test_a_job_that_cannot_fit_is_rejected_before_submission(arguments, message, capsys) -> None:
    assert cli.main([*SLURM[:2], arguments[0], *SLURM[2:], *arguments[1:]]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""
    assert len(printed.err.strip().splitlines()) == 1


@pytest.mark.parametrize("device", [["--launch.device", "h100"], []])
def test_a_job_that_fits_or_names_no_device_is_submitted(device, capsys) -> None:
    assert cli.main([*SLURM[:2], "llama3_8b", *SLURM[2:], *device]) == 0
    assert "#SBATCH" in capsys.readouterr().out
