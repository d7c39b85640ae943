"""Compilation: in place, per layer or submodule, and only if it is configured or saves time."""

from __future__ import annotations

import dataclasses
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import SHAPE, make_run, tiny_config
from torch import nn

from shardtrain.config.schema import Compile, Config
from shardtrain.distributed import compile
from shardtrain.models import build, find, shape_of
from shardtrain.ops.cross_entropy import cross_entropy_sum
from shardtrain.train import trainer


def _config(**options: Any) -> Config:
    return dataclasses.replace(Config(), compile=Compile(**{"backend": "eager", **options}))


def _mesh(tensor_parallel: int) -> Any:
    device = torch.device("cpu")
    return SimpleNamespace(
        device=device, size=lambda *axes: tensor_parallel if axes == ("tp",) else 1
    )


def _apply(tensor_parallel: int = 1, **options: Any) -> tuple[nn.Module, list[str]]:
    """Return a model and the paths of its compiled modules."""
    module = find("llama3")
    shape = shape_of(module, "debugmodel", {**SHAPE, "num_layers": 2}, "rmsnorm")
    assert build(module, shape)
    torch.manual_seed(0)
    model = module.Model(shape)
    compile.apply(model, module.LAYOUT, _mesh(tensor_parallel), _config(**options))
    return model, [
        path for path, part in model.named_modules() if part._compiled_call_impl is not None
    ]


def test_each_layer_is_compiled_and_no_other_module() -> None:
    assert _apply(enable=True)[1] == ["layers.0", "layers.1"]


def test_attention_and_feed_forward_are_compiled_separately_with_tensor_parallelism() -> None:
    """An entire layer with sequence parallelism fails in backward when compiled (torch 2.13)."""
    assert _apply(2, enable=True)[1] == [
        "layers.0.attn",
        "layers.0.ffn",
        "layers.1.attn",
        "layers.1.ffn",
    ]


@pytest.mark.parametrize("options", [{"enable": False}, {"enable": True, "components": ["loss"]}])
def test_layers_are_not_compiled_by_default(options: dict[str, Any]) -> None:
    assert _apply(**options)[1] == []


FLOPS = 10**8
"""FLOPs per token of about 16 million parameters."""
LONG = {"steps": 10_000, "local_batch_size": 8, "seq_len": 512}
"""40,960,000 tokens, or 20,000 seconds of the fastest core."""


def _decided(num_ranks: int = 1, flops: int = FLOPS, **sections: Any) -> bool | None:
    sections = {**sections, "training": {**LONG, **sections.get("training", {})}}
    config = tiny_config(**{"training": LONG, **sections})
    sizes = {"dp_shard": num_ranks, "tp": config.parallelism.tensor_parallel_degree}

    def size(*axes: str) -> int:
        return math.prod(sizes.get(axis, 1) for axis in axes)

    device_mesh = SimpleNamespace(size=lambda: math.prod(sizes.values()))
    device = torch.device(sections["training"].get("device", "cpu"))
    mesh = SimpleNamespace(
        device=device, size=size, device_mesh=device_mesh, sum_of_all=lambda tensor: tensor
    )
    try:
        return compile.decided(config, mesh, flops).compile.enable
    finally:
        torch._dynamo.config.suppress_errors = False


def test_long_run_on_a_cpu_is_compiled_unless_disabled(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert _decided() is True
    assert _decided(num_ranks=2) is True
    # bfloat16 with AMX is faster, so a long run needs more steps
    assert _decided(training={"mixed_precision_param": "bfloat16", "steps": 100_000}) is True
    assert _decided(compile={"enable": False}) is False

    short = {"steps": 200}  # 400 seconds on the fastest core
    assert _decided(training=short) is None
    assert _decided(training=short, compile={"enable": True}) is True
    # as long as LONG, but in steps of 2 ms
    assert _decided(flops=10**5, training={"steps": 10**7}) is None
    assert _decided(training={"epochs": 1}) is None


@pytest.mark.parametrize(
    "sections",
    [
        {"training": {"device": "cuda"}},
        {"training": {"cpu_kernels": "pytorch"}},
        {"debug": {"deterministic": True}},
        {"parallelism": {"tensor_parallel_degree": 2}},
        {"model": {"name": "transformers"}},
        {"model": {"name": "own.py"}},
        {"lora": {"enable": True}},
        {"model": {"converters": ["quantize.linear.float8"]}},
    ],
    ids=str,
)
def test_unmeasured_configurations_are_compiled_only_on_request(
    sections: dict[str, Any], monkeypatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert _decided(**sections) is None


def test_machine_without_a_cpp_compiler_compiles_nothing_by_default(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert _decided() is None


def test_result_of_the_vector_instruction_check_is_cached_only_on_success(
    tmp_path, monkeypatch
) -> None:
    inductor = pytest.importorskip("torch._inductor.config")
    cpu_vec_isa = pytest.importorskip("torch._inductor.cpu_vec_isa")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calls: list[bool] = []

    def valid(claimed: bool = False) -> list[str]:
        calls.append(claimed)
        return ["avx512", "avx2"] if claimed or working == "both" else ["avx2"]

    valid.__wrapped__ = lambda: valid(claimed=True)  # type: ignore[attr-defined]
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", valid)

    # Two compilers that differ in size, and so in their cache keys.
    first = tmp_path / "g++-12"
    second = tmp_path / "g++-13"
    for number, compiler in enumerate((first, second)):
        compiler.write_text(f"#!/bin/sh\n{'#' * number}")
        compiler.chmod(0o755)

    # Instruction sets that work, compiler, cached result, total number of checks.
    rounds = (
        ("one",  first,  None, 2),
        ("both", first,  True, 4),
        ("both", first,  True, 4),
        ("one",  second, None, 6),
    )  # fmt: skip
    for working, compiler, trusted, times in rounds:  # noqa: B007
        monkeypatch.setenv("CXX", str(compiler))
        monkeypatch.setattr(inductor.cpp, "vec_isa_ok", None)
        compile._remember_vector_instructions()

        assert (inductor.cpp.vec_isa_ok, len(calls)) == (trusted, times)


def test_truncated_libraries_of_killed_runs_are_removed(tmp_path, monkeypatch, caplog) -> None:
    """PyTorch's own library serves as a complete one. Libraries that are being written are locked by their writers."""
    codecache = pytest.importorskip("torch._inductor.codecache")
    from torch.utils._filelock import FileLock

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    folder = tmp_path / "ab"
    folder.mkdir()
    complete = Path(torch._C.__file__).read_bytes()
    contents = {
        "empty": b"",
        "cut": complete[: len(complete) // 2],
        "zeros": bytes(4096),
        "locked": b"",
        "whole": complete,
    }
    for name, content in contents.items():
        (folder / f"{name}.main.so").write_bytes(content)
    (folder / "locked.main.cpp").write_text("")
    with FileLock(Path(codecache.get_lock_dir()) / "locked.lock", timeout=1):
        compile._remove_cut_libraries()
        remaining = {path.name for path in folder.iterdir()}

    assert remaining == {"locked.main.cpp", "locked.main.so", "whole.main.so"}
    assert sorted(record.args or record.getMessage() for record in caplog.records) == [
        f"removed {folder / name}.main.so, which a killed run left half written"
        for name in ("cut", "empty", "zeros")
    ]


def _trained(rank: int, enable: bool | None, lasts: bool) -> tuple[int, list[float]]:
    """Return the number of compiled layers, and the losses of two steps."""
    with pytest.MonkeyPatch.context() as patch:
        if lasts:
            patch.setattr(compile, "LONG_SECONDS", 0.0)
            patch.setattr(compile, "SHORT_STEP_SECONDS", 0.0)
        config = tiny_config(compile={"enable": enable, "backend": "aot_eager"})
        run = make_run(rank, config)
        layers = run.runner.parts[0].layers.values()
        losses = [float(trainer.step(run).loss_sum) for _ in range(2)]
        num_compiled = sum(layer._compiled_call_impl is not None for layer in layers)
        assert bool(run.config.compile.enable) == (num_compiled > 0)
        return num_compiled, losses


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_decide_alike_and_train_as_with_compilation_configured(num_ranks: int) -> None:
    by_default = run_ranks(num_ranks, _trained, None, True)
    assert by_default == run_ranks(num_ranks, _trained, True, False)
    assert {count for count, _ in by_default} == {2}
    assert {count for count, _ in run_ranks(num_ranks, _trained, None, False)} == {0}


def test_names_never_change_and_numbers_match_eager_mode() -> None:
    plain, _ = _apply(enable=False)
    compiled, _ = _apply(enable=True)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert not any("_orig_mod" in name for name, _ in compiled.named_modules())

    tokens = torch.arange(16).view(1, 16)
    positions = torch.arange(16)[None]
    # the backend "eager" uses the same kernels
    assert torch.equal(compiled(tokens, positions), plain(tokens, positions))


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        ({"enable": True}, True),
        ({"enable": True, "components": ["loss"]}, True),
        ({"enable": True, "components": ["model"]}, False),
        ({"enable": False}, False),
    ],
)
def test_loss_is_compiled_if_configured(options: dict[str, Any], passed: bool) -> None:
    chunk = compile.chunk_loss(_config(**options))
    assert (chunk is not None) is passed

    if chunk is not None:
        torch.manual_seed(0)
        logits = torch.randn(2, 3, 5)
        targets = torch.randint(0, 5, (2, 3))
        expected = cross_entropy_sum(logits, targets)
        assert torch.equal(cross_entropy_sum(logits, targets, chunk=chunk), expected)
