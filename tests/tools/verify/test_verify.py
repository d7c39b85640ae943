"""``verify`` has no false alarms, rejects impossible requests before a process starts, and reports its changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardtrain import cli, config
from shardtrain.tools import verify
from shardtrain.tools.verify import meshes, verify_report, verify_request
from shardtrain.tools.verify.verify_report import MeshResult
from shardtrain.utils.errors import ConfigError

CLEAN = ("dp_shard=2", "tp=2", "cp=2", "pp=2", "ep=2")


@pytest.mark.parametrize(("model", "seed"), [("llama3", 1), ("mixtral", 2)])
def test_clean_runs_give_no_alarm(make_bench, model, seed):
    names = CLEAN if model == "mixtral" else CLEAN[:-1]
    bench = make_bench(names, f"--model.name={model}", f"--debug.seed={seed}")
    for name in names:
        row = bench.run(name)
        assert row.verdict == "same", row
        assert row.cause == "", row
        assert row.initial == 0, row


def test_tokens_of_one_expert_dropped(make_bench, monkeypatch):
    from shardtrain.models import moe

    bench = make_bench(("dp_shard=2",), "--model.name=mixtral", steps=1)
    bench.shake()
    forward = moe.Dispatch.forward

    def drop(self, experts, x_RD, count_E):
        mask = torch.ones(len(x_RD), 1)
        first = int(count_E[:3].sum())
        mask[first : first + int(count_E[3])] = 0
        return forward(self, experts, x_RD * mask, count_E) * mask

    monkeypatch.setattr(moe.Dispatch, "forward", drop)
    row = bench.run("dp_shard=2")

    assert row.verdict == "differs", row
    assert "expert 3" in row.cause, row
    assert "dropped" in row.cause, row


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("tq=2", ['has an unknown axis "tq"', "axes are dp_replicate"]),
        ("tp=two", ['has an invalid degree "two" of tp']),
        ("tp=0", ['has an invalid degree "0" of tp']),
        ("tp=2,tp=4", ["names tp twice"]),
        ("tp", ['has an invalid degree "" of tp']),
    ],
)
def test_malformed_mesh_arguments_are_explained(text, parts):
    with pytest.raises(ConfigError) as error:
        meshes.read(text)
    assert all(part in str(error.value) for part in parts)


def test_experts_borrow_ranks_from_shards_where_no_other_axis_has_them():
    assert meshes.read("ep=4") == {"ep": 4, "dp_shard": 4}
    assert meshes.read("ep=2,tp=2") == {"ep": 2, "tp": 2}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ["--mesh", "tp=3"],
            [
                "--mesh tp=3: parallelism.tensor_parallel_degree=3 does not divide the 16 attention heads"
            ],
        ),
        (["--mesh", "pp=16"], ["parallelism.pipeline_parallel_degree=16 exceeds the 6 layers"]),
        (
            ["--mesh", "pp=2", "--schedule", "2F2B"],
            ['pipeline_parallel_schedule="2F2B" is not a schedule'],
        ),
        (["--mesh", "ep=2"], ["expert_parallel_degree=2"]),
        (["--mesh", "tp=2", "--schedule", "1F1B"], ["has no effect without pipeline stages"]),
        (["--mesh"], ["--mesh has no value"]),
        (["--steps", "0"], ["--steps"]),
        (["--mesh", "tp=2", "--training.device", "cuda"], ["requires 2 devices"]),
        (["--mesh", "tp=2", "--training.sequence", "3"], ["training.sequence"]),
    ],
)
def test_impossible_requests_are_rejected_before_a_process_starts(
    arguments, parts, capsys, monkeypatch
):
    monkeypatch.setattr(verify.forked_workers, "run", None)
    monkeypatch.setattr("shardtrain.launch.environment.count_accelerators", lambda _: 0)
    assert cli.main(["verify", *arguments]) == 2

    error = capsys.readouterr().err
    for part in parts:
        assert part in error


def test_a_wrong_mesh_is_refused_without_torch():
    code = "import sys; from shardtrain import cli; "
    code += "print(cli.main(['verify', '--mesh', 'tp=3']), 'torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert result.stdout.split() == ["2", "False"]


def test_the_default_meshes_have_the_configured_axes_and_name_impossible_ones():
    degrees = {
        "tensor_parallel_degree": 4,
        "data_parallel_shard_degree": 64,
        "context_parallel_degree": 2,
    }
    arguments = [f"--parallelism.{name}={value}" for name, value in degrees.items()]
    loaded = config.load(None, [*arguments, "--model.overrides.num_kv_heads=1"])
    plans = meshes.default(loaded, ())

    assert plans[0].name == "dp_shard=2,tp=2,cp=2"
    assert all(plan.num_ranks <= 8 for plan in plans)
    problems = [plan.problem for plan in plans if plan.name == "tp=2"]
    assert any("does not divide" in text and "1 KV heads" in text for text in problems)
    assert not any("ep" in plan.degrees for plan in plans)

    possible = [plan.name for plan in plans if not plan.problem]
    assert {"dp_replicate=2", "dp_shard=2", "pp=2", "cp=2"} <= set(possible)


def test_each_schedule_is_tried_on_each_mesh_with_stages():
    loaded = config.load(None, [])
    plans = meshes.requested(loaded, ["pp=2", "tp=2"], ("1F1B", "ZBVZeroBubble"))
    assert [(plan.name, plan.schedule) for plan in plans] == [
        ("pp=2", "1F1B"),
        ("pp=2", "ZBVZeroBubble"),
        ("tp=2", ""),
    ]

    task = verify.plan(
        loaded, verify_request.VerifyOptions(meshes=("pp=2",), schedules=("1F1B", "ZBVZeroBubble"))
    )
    assert task.reference.model.overrides["num_layers"] == 4  # two stages per rank


def test_options_that_verify_disables_are_noted_and_not_rejected():
    options = {
        "optimizer.name": "Muon",
        "optimizer.muon_steps": 3,
        "optimizer.qk_clip_threshold": 100.0,
        "training.mixed_precision_param": "float16",
        "training.initial_loss_scale": 1024,
        "training.enable_cpu_offload": "true",
        "lr_scheduler.name": "linear_by_proportion",
        "lr_scheduler.warmup_proportion": 0.5,
        "compile.enable": "true",
        "activation_checkpoint.mode": "memory_budget",
        "activation_checkpoint.memory_budget": 0.3,
    }
    loaded = config.load(None, [f"--{name}={value}" for name, value in options.items()])
    task = verify.plan(loaded, verify_request.VerifyOptions(meshes=("dp_shard=2",)))
    notes = "\n".join(task.notes)

    assert "optimizer: Muon -> AdamW" in notes
    assert "optimizer.qk_clip_threshold: off" in notes
    assert "precision: float16 -> float32" in notes
    assert "compile: off" in notes
    assert "memory_budget" in notes

    # The mesh keeps an option that the reference cannot have.
    assert task.plans[0].loaded.config.training.enable_cpu_offload
    assert not task.reference.training.enable_cpu_offload


def test_the_arguments_of_a_request_are_parsed():
    arguments = ["run.toml", "--mesh", "tp=2", "pp=2", "--mesh=cp=2", "--steps", "5"]
    arguments += ["--full", "--debug.seed", "3", "--json"]
    expected = verify_request.VerifyOptions(
        "run.toml",
        ("tp=2", "pp=2", "cp=2"),
        steps=5,
        full=True,
        json=True,
        overrides=("--debug.seed", "3"),
    )

    assert verify_request.read(arguments) == expected


def test_schedules_and_the_command_line_end_to_end(capsys):
    arguments = [
        "verify",
        "--mesh",
        "pp=2",
        "--schedule",
        "Interleaved1F1B",
        "ZBVZeroBubble",
        "--steps",
        "1",
    ]
    assert cli.main(arguments) == 0

    out = capsys.readouterr().out
    assert "num_layers 6 -> 4" in out
    assert "AdamW with eps 0.01" in out
    assert "bfloat16 -> float32" in out
    assert out.count(" same ") == 2
    assert "ZBVZeroBubble" in out
    assert "bitwise" in out


def test_full_keeps_the_model_and_its_weights(capsys):
    sizes = {
        "num_layers": 2,
        "dim": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "ffn_dim": 48,
        "vocab_size": 96,
    }
    arguments = [f"--model.overrides.{name}={value}" for name, value in sizes.items()]
    arguments += ["--mesh=dp_shard=2", "--steps=1", "--full", "--json", "--training.seq_len=24"]
    assert verify.main(arguments) == 0

    # No note about a smaller model, and the rows are those of the options.
    report = json.loads(capsys.readouterr().out)
    assert not any("->" in note and "model" in note for note in report["notes"])
    assert any("24 synthetic tokens" in note for note in report["notes"])
    assert report["exit_code"] == 0


EXITS = {
    # verdicts of the rows -> exit status for the default meshes, requested meshes, requested with --allow-impossible
    ("same",): (0, 0, 0),
    ("same", "not possible"): (0, 4, 0),
    ("not possible",): (4, 4, 0),
    ("same", "failed"): (4, 4, 4),
    ("same", "not proven"): (4, 4, 4),
    ("differs", "not possible"): (4, 4, 4),
}
REQUESTS = (
    verify_request.VerifyOptions(),
    verify_request.VerifyOptions(meshes=("tp=2",)),
    verify_request.VerifyOptions(meshes=("tp=2",), allow_impossible=True),
)


@pytest.mark.parametrize("verdicts", EXITS)
def test_exit_status_of_verdicts(verdicts):
    rows = [MeshResult("tp=2", "", verdict) for verdict in verdicts]
    assert tuple(verify_report.exit_code(rows, request) for request in REQUESTS) == EXITS[verdicts]


def test_the_row_of_one_process_is_no_mesh():
    """With ``--precision own``, one process is always compared, also if no mesh of the default list is possible."""
    rows = [
        MeshResult(verify_report.ONE_PROCESS, "", "same"),
        MeshResult("tp=2", "", "not possible"),
    ]
    assert verify_report.exit_code(rows, verify_request.VerifyOptions(precision="own")) == 4


def test_a_mesh_that_the_model_rules_out_fails_unless_allowed(tmp_path, capsys):
    """A requested mesh without a result is a failure, because scripts only check the status."""
    text = (Path(__file__).parent / "sound_model.py").read_text()
    path = tmp_path / "model.py"
    path.write_text(text.replace("self.norm(x))", "self.norm(x + self.embed(tokens)))"))
    arguments = ["verify", str(path), "--mesh", "pp=2", "dp_shard=2", "--steps", "1", "--json"]
    assert cli.main(arguments) == json.loads(capsys.readouterr().out)["exit_code"] == 4
    assert cli.main([*arguments, "--allow-impossible"]) == 0

    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["mesh"], row["verdict"]) for row in rows] == [
        ("pp=2", "not possible"),
        ("dp_shard=2", "same"),
    ]


def test_a_mesh_that_the_configuration_rules_out_is_a_row_if_allowed():
    task = verify.plan(
        config.load(None, []), verify_request.VerifyOptions(meshes=("tp=3",), allow_impossible=True)
    )
    assert "does not divide" in task.plans[0].problem


def test_allow_impossible_without_meshes_is_rejected(capsys):
    assert cli.main(["verify", "--allow-impossible"]) == 2
    assert "--allow-impossible has no effect without --mesh" in capsys.readouterr().err


def test_the_table_shows_the_differences():
    same = MeshResult("tp=2", "", "same", 1.0, 0, 0.0, 0.0, 0.0, 0.0)
    wrong = MeshResult("cp=2", "", "failed", cause="rank 1 died")
    differs = MeshResult(
        "pp=2", "1F1B", "differs", 1.0, 0, 1.0, float("inf"), 0.0, 0.0, "step 1: here", "this"
    )
    impossible = MeshResult("ep=2", "", "not possible", cause="no experts")
    text = verify_report.table([same, wrong, differs, impossible])

    assert "pp=2 1F1B: step 1: here\n  likely cause: this" in text
    assert "ep=2: not possible: no experts" in text
    assert json.loads(verify_report.document("m", [], [differs], 4))["rows"][0]["gradient"] is None
