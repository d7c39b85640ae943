"""Import and export of torch.distributed.checkpoint folders is bitwise exact in both directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dcp_folders import GROUP, OVERRIDES, STEP, TOKENS, load, rows, save, saved_one, words
from ranks import run_ranks
from tiers import cases
from tiny import tiny_config, train_whole
from torch import Tensor

from shardtrain import cli
from shardtrain.checkpoint import manifest, weights_file
from shardtrain.models.layers import RotaryAngles, rotate, rotate_pairs
from shardtrain.tools.dcp import naming
from shardtrain.tools.dcp.stored import DcpFolder
from shardtrain.utils.errors import ConfigError

OURS = {
    "tok_embeddings": "embed",
    "output": "head",
    "attention_norm": "attn_norm",
    "attention": "attn",
}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    stored = manifest.read(folder)
    tensors = {}
    for name, entry in stored.tensors.items():
        data = weights_file.whole_bytes(stored, folder, entry)
        tensor = torch.frombuffer(data, dtype=getattr(torch, entry.dtype))
        tensors[name] = tensor.view(entry.shape)
    return tensors


def our_name(theirs: str) -> str:
    prefix = "optimizer." if theirs.startswith("optimizer.state.") else "model."
    parts = theirs.removeprefix("optimizer.state.").replace("feed_forward", "ffn").split(".")
    return prefix + ".".join(OURS.get(part, part) for part in parts)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []
    assert {name: t.dtype for name, t in actual.items()} == {
        name: t.dtype for name, t in expected.items()
    }


@pytest.mark.parametrize("ranks", cases([2], nightly=[1, 4]))
def test_a_pytorch_checkpoint_imports_bitwise(ranks: int, tmp_path: Path) -> None:
    expected = run_ranks(ranks, save, str(tmp_path / "step-3"))[0]
    assert (
        cli.main(
            ["checkpoint", "from-dcp", str(tmp_path / "step-3"), str(tmp_path / "ours"), *words()]
        )
        == 0
    )

    ours = {our_name(name): rows(name, tensor) for name, tensor in expected.items()}
    assert_equal(tensors_of(tmp_path / "ours"), ours)
    stored = manifest.read(tmp_path / "ours")
    state = stored.facts["state"]
    assert (stored.step, state["updates"], state["tokens_seen"], stored.facts["weights_only"]) == (
        STEP,
        STEP,
        TOKENS,
        False,
    )


@pytest.mark.parametrize("ranks", cases([2], nightly=[1, 4]))
def test_an_exported_checkpoint_loads_in_pytorch_bitwise(ranks: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "model": {"overrides": OVERRIDES},
        "job": {"dump_folder": str(tmp_path / "run")},
        "training": {"steps": 2, "local_batch_size": 1, "global_batch_size": 4},
        "checkpoint": {"enable": True, "interval": 2},
        "parallelism": {"data_parallel_shard_degree": ranks},
    }
    assert run_ranks(ranks, train_whole, tiny_config(**options))[0].error is None

    # PyTorch loads the exported folder into torchtitan's model on the same number of ranks.
    step = tmp_path / "run/checkpoint/step-2"
    assert cli.main(["checkpoint", "to-dcp", str(step), str(tmp_path / "theirs")]) == 0
    loaded, counters, group = run_ranks(ranks, load, str(tmp_path / "theirs"))[0]
    assert_equal(
        {our_name(name): rows(name, tensor) for name, tensor in loaded.items()}, tensors_of(step)
    )
    assert counters == {
        "step": 2,
        "ntokens_seen": manifest.read(step).facts["state"]["tokens_seen"],
    }
    assert {**group, "betas": tuple(group["betas"])} == {
        **GROUP,
        "eps": tiny_config().optimizer.eps,
        "lr": tiny_config().optimizer.lr,
    }


def test_a_schedule_file_named_by_a_run_is_not_executed(tmp_path: Path, capsys: Any) -> None:
    schedule = tmp_path / "my_schedule.py"
    schedule.write_text("def factor(step, total_steps):\n    return 0.5\n")
    options: dict[str, Any] = {
        "model": {"overrides": OVERRIDES},
        "job": {"dump_folder": str(tmp_path / "run")},
        "training": {"steps": 1, "local_batch_size": 1, "global_batch_size": 1},
        "checkpoint": {"enable": True, "interval": 1},
        "lr_scheduler": {"name": str(schedule)},
    }
    assert run_ranks(1, train_whole, tiny_config(**options))[0].error is None

    # Make the schedule file create a file when it is executed.
    schedule.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{schedule.read_text()}")
    command = ["checkpoint", "to-dcp", str(tmp_path / "run"), str(tmp_path / "dcp")]
    assert cli.main(command) == 2
    assert not (tmp_path / "ran").exists()

    # The error names the fix: pass the configuration explicitly, which means to trust its files.
    message = capsys.readouterr().err
    assert "my_schedule.py" in message
    assert "--config" in message
    assert cli.main([*command, f"--config={tmp_path / 'run/config.resolved.toml'}"]) == 0
    assert (tmp_path / "ran").exists()


def test_a_round_trip_changes_only_what_a_folder_cannot_store(tmp_path: Path) -> None:
    folder = saved_one(tmp_path / "step-3")
    main = ["checkpoint", "from-dcp", str(folder), str(tmp_path / "ours"), *words()]
    assert cli.main(main) == 0

    # Write the options of the run as a TOML file: the same lines without dashes.
    config = tmp_path / "run.toml"
    config.write_text("".join(f"{option[2:].replace('=', ' = ')}\n" for option in words()))
    back = ["checkpoint", "to-dcp", str(tmp_path / "ours"), str(tmp_path / "b")]
    assert cli.main([*back, f"--config={config}"]) == 0

    before = DcpFolder(folder)
    after = DcpFolder(tmp_path / "b")
    tensors_before = {name: before.tensor(name) for name in before.tensors}
    tensors_after = {name: after.tensor(name) for name in after.tensors}
    assert_equal(tensors_before, tensors_after)

    # The export keeps only the training state of the entries that are not tensors.
    train_state = {}
    for name in after.objects:
        if name.startswith("train_state"):
            train_state[name] = after.value(name)
    assert train_state == {"train_state.step": STEP, "train_state.ntokens_seen": TOKENS}


@pytest.mark.parametrize("kind", naming.NAMINGS)
def test_weights_without_optimizer_survive_a_round_trip_with_either_naming(
    kind: str, tmp_path: Path, capsys: Any
) -> None:
    folder = saved_one(tmp_path / "step-3")
    ours = str(tmp_path / "ours")
    assert (
        cli.main(["checkpoint", "from-dcp", str(folder), ours, "--optimizer=false", *words()]) == 0
    )
    assert cli.main(["checkpoint", "to-dcp", ours, str(tmp_path / "out"), f"--names={kind}"]) == 0
    assert "without the optimizer's state" in capsys.readouterr().out
    assert (
        cli.main(
            ["checkpoint", "from-dcp", str(tmp_path / "out"), str(tmp_path / "back"), *words()]
        )
        == 0
    )
    # 1 is allowed, because the step name differs
    assert cli.main(["checkpoint", "diff", ours, str(tmp_path / "back")]) in (
        0,
        1,
    )
    assert_equal(tensors_of(tmp_path / "back"), tensors_of(tmp_path / "ours"))
    assert f"with names of {kind}" in capsys.readouterr().out


def test_reordered_queries_and_keys_reproduce_interleaved_rotary_scores() -> None:
    """torchtitan rotates the pairs (x_2i, x_2i+1). After the reordering, our rotation gives the same products."""
    torch.manual_seed(0)
    heads = 2
    head_dim = 8
    positions = torch.arange(5).unsqueeze(0)
    config = type("Config", (), {"head_dim": head_dim})()
    names = naming.Naming(naming.TORCHTITAN, "llama3", config)
    theirs = {w: torch.randn(heads * head_dim, 16, dtype=torch.float64) for w in ("wq", "wk")}
    x_BTD = torch.randn(1, 5, 16, dtype=torch.float64)
    angles = RotaryAngles(head_dim, 10000.0)(positions)

    def scores(turn: Any, weights: dict[str, Tensor]) -> Tensor:
        q, k = (
            turn((x_BTD @ weights[w].T).unflatten(-1, (heads, head_dim)), angles)
            for w in ("wq", "wk")
        )
        return torch.einsum("btnh,bsnh->bnts", q, k)

    ours = {w: names.to_ours(f"layers.0.attn.{w}.weight", tensor) for w, tensor in theirs.items()}

    # A tolerance is needed, because rotations are computed in float32.
    torch.testing.assert_close(
        scores(rotate, ours), scores(rotate_pairs, theirs), rtol=1e-5, atol=1e-5
    )
    for name, expected in theirs.items():
        converted = names.to_theirs(f"layers.0.attn.{name}.weight", ours[name])
        assert torch.equal(converted, expected), name


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (words(num_layers=3), "9 missing: layers.2.attention_norm.weight"),
        (
            words(num_layers=1),
            "has tensors that llama3 debugmodel does not have: layers.1.attention",
        ),
        (words(ffn_dim=64), "layers.0.feed_forward.w1.weight [48, 32] instead of [64, 32]"),
        (["--model.name=neox"], "is not neox debugmodel"),
        ([*words(), "--optimizer=maybe"], "--optimizer=maybe must be true or false"),
    ],
)
def test_a_folder_of_another_model_is_rejected_without_writing(
    options: list[str], message: str, tmp_path: Path, capfd: Any
) -> None:
    folder = saved_one(tmp_path / "step-3")
    assert cli.main(["checkpoint", "from-dcp", str(folder), str(tmp_path / "ours"), *options]) in (
        2,
        5,
    )

    error = capfd.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-3"]


def saved(
    folder: Path, optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW, **more: Any
) -> Path:
    """Save the DCP folder of a model and its optimizer state, plus the entries ``more``, from one process."""
    import torch.distributed.checkpoint as dcp
    from dcp_folders import TitanLlama

    model = TitanLlama()
    model(torch.arange(9)).sum().backward()
    steps = optimizer(model.parameters())
    steps.step()
    names = [name for name, _ in model.named_parameters()]
    state = {}
    for number, entry in steps.state_dict()["state"].items():
        for key, value in entry.items():
            state[f"state.{names[number]}.{key}"] = value
    dcp.save({**model.state_dict(), "optimizer": state, **more}, checkpoint_id=folder, no_dist=True)
    return folder


def test_the_state_of_another_optimizer_is_not_mistaken_for_adam(
    tmp_path: Path, capfd: Any
) -> None:
    folder = saved(tmp_path / "nadam", torch.optim.NAdam)
    main = ["checkpoint", "from-dcp", str(folder), str(tmp_path / "a"), *words()]
    assert cli.main([*main, "--optimizer=true"]) == 5
    assert "it is from another optimizer, with optimizer.state." in capfd.readouterr().err
    assert cli.main(main) == 0
    assert "optimizer: skipped" in capfd.readouterr().out
    assert manifest.read(tmp_path / "a").facts["weights_only"] is True


def test_tensor_counters_are_read_and_rotary_tables_ignored(tmp_path: Path, capfd: Any) -> None:
    counters = {"step": torch.tensor(7), "ntokens_seen": torch.tensor(99)}
    folder = saved(
        tmp_path / "old", train_state=counters, freqs_cis=torch.ones(3, dtype=torch.complex64)
    )
    assert cli.main(["checkpoint", "from-dcp", str(folder), str(tmp_path / "a"), *words()]) == 0
    assert "freqs_cis (complex64): skipped" in capfd.readouterr().out

    state = manifest.read(tmp_path / "a").facts["state"]
    assert (state["step"], state["updates"], state["tokens_seen"]) == (7, 7, 99)


def test_names_of_wrapped_modules_are_read(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from dcp_folders import TitanLlama

    # DDP adds "module" to names, and torch.compile adds "_orig_mod".
    plain = TitanLlama().state_dict()
    wrapped = {}
    for name, tensor in plain.items():
        wrapped[f"module.{name.replace('.attention.', '._orig_mod.attention.')}"] = tensor
    folder = tmp_path / "wrapped"
    dcp.save(wrapped, checkpoint_id=folder, no_dist=True)

    command = ["checkpoint", "from-dcp", str(folder), str(tmp_path / "a"), *words()]
    assert cli.main(command) == 0
    expected = {our_name(name): rows(name, tensor) for name, tensor in plain.items()}
    assert_equal(tensors_of(tmp_path / "a"), expected)


def test_a_llama_2_of_the_first_torchtitan_imports_and_exports(tmp_path: Path, capsys: Any) -> None:
    folder = saved_one(tmp_path / "step-3")
    ours = tmp_path / "ours"
    command = ["checkpoint", "from-dcp", str(folder), str(ours), "--model.name=llama2", *words()]
    assert cli.main(command) == 0
    assert "rotary angles" not in capsys.readouterr().out

    # Importing does not change the weights.
    before = DcpFolder(folder)
    expected = {}
    for name in before.tensors:
        if not name.startswith(("optim", "train")):
            expected[our_name(name)] = rows(name, before.tensor(name))
    imported = tensors_of(ours)
    weights = {name: tensor for name, tensor in imported.items() if name.startswith("model.")}
    assert_equal(weights, expected)

    # Exporting restores the tensors of the original folder.
    assert cli.main(["checkpoint", "to-dcp", str(ours), str(tmp_path / "b"), "--model-only"]) == 0
    after = DcpFolder(tmp_path / "b")
    original = {name: before.tensor(name) for name in after.tensors}
    exported = {name: after.tensor(name) for name in after.tensors}
    assert_equal(original, exported)


EXPERTS = ["router.gate.weight", *(f"experts.{w}" for w in ("w1", "w2", "w3"))]
SHARED = [f"shared_experts.{w}.weight" for w in ("w1", "w2", "w3")]
THEIRS = {
    # From torchtitan's state dict adapters, without layer numbers.
    "llama4": {
        *(f"attention.{w}.weight" for w in ("wq", "wk", "wv", "wo")),
        *(f"moe.{name}" for name in [*EXPERTS, *SHARED]),
        *(f"feed_forward.{w}.weight" for w in ("w1", "w2", "w3")),
        *("attention_norm.weight", "ffn_norm.weight"),
    },
    "deepseek_v2": {
        *(f"attention.{w}.weight" for w in ("wq", "wkv_a", "kv_norm", "wkv_b", "wo")),
        *(f"moe.{name}" for name in [*EXPERTS, *SHARED]),
        *(f"feed_forward.{w}.weight" for w in ("w1", "w2", "w3")),
        *("attention_norm.weight", "ffn_norm.weight"),
    },
}


@pytest.mark.parametrize("family", THEIRS)
def test_names_match_torchtitan_s_state_dict_adapters(family: str) -> None:
    from shardtrain import models

    module = models.find(family)
    config = models.shape_of(module, next(iter(module.FLAVORS)), {"num_layers": 4}, "rmsnorm")
    names = naming.naming(naming.TORCHTITAN, family, config)
    ours = [name for name, _ in models.build(module, config).named_parameters()]
    converted = [names.theirs(name) for name in ours]

    assert len(set(converted)) == len(converted)

    ends = {name.split(".", 2)[2] for name in converted if name.startswith("layers.")}
    assert ends == THEIRS[family]
    assert {name for name in converted if not name.startswith("layers.")} == {
        "tok_embeddings.weight",
        "norm.weight",
        "output.weight",
    }


def test_a_model_with_another_layout_is_rejected_in_both_directions(
    tmp_path: Path, capfd: Any
) -> None:
    folder = saved_one(tmp_path / "step-3")
    assert (
        cli.main(
            ["checkpoint", "from-dcp", str(folder), str(tmp_path / "ours"), "--model.name=gpt_oss"]
        )
        == 2
    )

    message = capfd.readouterr().err
    assert "gpt_oss" in message
    assert "w1 and w3 of experts in one matrix" in message
    assert "shardtrain import" in message
    with pytest.raises(
        ConfigError, match=r"use --names=shardtrain; reason: .*w1 and w3 of experts in one matrix"
    ):
        naming.naming(naming.TORCHTITAN, "gpt_oss", None)
    assert not (tmp_path / "ours").exists()


def test_different_rotary_angles_in_torchtitan_are_reported() -> None:
    """torchtitan always scales Llama, and stretches DeepSeek-V3 for rows longer than 4096 tokens."""
    from shardtrain import models
    from shardtrain.tools.dcp.dcp_reader import _other_angles
    from shardtrain.utils.errors import ConfigError

    def config(name: str, **overrides: Any) -> Any:
        return models.shape_of(models.find(name), "debugmodel", overrides, "rmsnorm")

    (line,) = _other_angles("llama3", config("llama3"), None)

    assert 'rope_scaling = "llama3"' in line
    assert not _other_angles("llama3", config("llama3", rope_scaling="llama3"), None)

    deep = config("deepseek_v3", rope_factor=40.0)
    assert not _other_angles("deepseek_v3", deep, 8192)
    assert len(_other_angles("deepseek_v3", deep, None)) == 1
    with pytest.raises(
        ConfigError,
        match=r"rope_factor=40.0 differs from torchtitan's angles with training.seq_len=2048",
    ):
        _other_angles("deepseek_v3", deep, 2048)
    assert not _other_angles("deepseek_v3", config("deepseek_v3", rope_factor=1.0), 2048)


def test_an_exported_folder_has_all_keys_of_pytorch_s_schedule_and_optimizer(
    tmp_path: Path,
) -> None:
    folder = saved_one(tmp_path / "step-3")
    assert cli.main(["checkpoint", "from-dcp", str(folder), str(tmp_path / "ours"), *words()]) == 0
    config = tmp_path / "run.toml"
    config.write_text(
        '[optimizer]\nname = "Adam"\n' + "".join(f"{w[2:].replace('=', ' = ')}\n" for w in words())
    )
    text = config.read_text()
    config.write_text("\n".join(sorted(text.splitlines(), key=lambda line: "model" not in line)))
    assert (
        cli.main(
            [
                "checkpoint",
                "to-dcp",
                str(tmp_path / "ours"),
                str(tmp_path / "b"),
                f"--config={config}",
            ]
        )
        == 0
    )

    exported = DcpFolder(tmp_path / "b")
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    schedule_state = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0).state_dict()

    assert {f"lr_scheduler.{key}" for key in schedule_state} <= exported.objects.keys()
    assert exported.value("lr_scheduler.last_epoch") == STEP

    group = "optimizer.param_groups.norm.weight."
    assert {
        group + key for key in optimizer.param_groups[0] if key != "params"
    } <= exported.objects.keys()

    # The run used Adam instead of AdamW, so its weight decay is not decoupled.
    decoupled = group + "decoupled_weight_decay"
    assert decoupled not in exported.objects or exported.value(decoupled) is False


def test_a_folder_without_optimizer_state_imports_weights_with_a_note(
    tmp_path: Path, capfd: Any
) -> None:
    import torch.distributed.checkpoint as dcp
    from dcp_folders import TitanLlama

    # torchtitan v0.1 saved such a folder
    dcp.save({"model": TitanLlama().state_dict()}, checkpoint_id=tmp_path / "old", no_dist=True)
    main = ["checkpoint", "from-dcp", str(tmp_path / "old")]
    assert cli.main([*main, str(tmp_path / "a"), *words(), "--optimizer", "true"]) == 5
    assert "no optimizer state: it has none" in capfd.readouterr().err
    assert cli.main([*main, str(tmp_path / "b"), *words()]) == 0
    assert manifest.read(tmp_path / "b").facts["weights_only"] is True
