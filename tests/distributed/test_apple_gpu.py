"""Steps on a simulated Apple GPU: no float64 and no operation that PyTorch lacks there. Not run on a Mac.

The simulated accelerator (``pretended_accelerator.py``) gets the rules of ``mps``. The operations that PyTorch has on
that device are those of ``native_functions.yaml``, which PyTorch installs with its code generator.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchgen
from pretended_accelerator import NAME, Pretended, in_a_fork, pretending
from tiers import cases
from tiny import tiny_config
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten
from torchgen.gen import parse_native_yaml
from torchgen.model import DispatchKey

from shardtrain.config import problems_of
from shardtrain.config.load import Loaded
from shardtrain.config.schema import Config
from shardtrain.distributed.process_group import World
from shardtrain.models import find, moe
from shardtrain.ops import accelerator, sampling
from shardtrain.ops.sampling import Sampling
from shardtrain.tools.generate.engine import Generator
from shardtrain.train import trainer

CASES: dict[str, dict[str, Any]] = {
    "llama3": {},
    "bfloat16": {"training": {"mixed_precision_param": "bfloat16"}},
    "float16": {"training": {"mixed_precision_param": "float16"}},
    "documents": {"data": {"packing": "concat", "document_mask": "on"}},
    "padded": {"data": {"packing": "padded", "long_documents": "cut"}},
    "recomputed": {"activation_checkpoint": {"mode": "full"}},
    "operators recomputed": {
        "activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}
    },
    "Adam": {"optimizer": {"name": "Adam"}},
    "foreach": {"optimizer": {"name": "AdamW", "implementation": "foreach"}},
    "Muon": {"optimizer": {"name": "Muon"}},
    "AdamW8bit": {"optimizer": {"name": "AdamW8bit"}},
    "LoRA": {"lora": {"enable": True}},
    "averages": {"training": {"ema_decay": 0.9}},
    "label smoothing": {"training": {"label_smoothing": 0.1, "z_loss_weight": 1e-3}},
    **{
        family: {"model": {"name": family, "flavor": "debugmodel", "overrides": {"num_layers": 2}}}
        for family in (
            "llama2",
            "mistral",
            "qwen2",
            "qwen3",
            "neox",
            "mixtral",
            "deepseek_v3",
            "gpt_oss",
        )
    },
}


class Apple(Pretended):
    """Records operations on the device, and tensors of dtypes that it lacks."""

    def __init__(self, answers: Any = None) -> None:
        super().__init__(answers)
        self.operations: set[str] = set()
        self.wide: set[str] = set()

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = super().__torch_dispatch__(func, kinds, args, kwargs)
        values, _ = tree_flatten((args, kwargs, answer))
        tensors = [value for value in values if isinstance(value, Tensor)]
        for tensor in tensors:
            if tensor.device.type != NAME:
                continue
            self.operations.add(func.name())
            if tensor.dtype in (torch.float64, torch.complex128):
                self.wide.add(f"{func.name()}: {tensor.dtype}")
        return answer


@functools.cache
def known_operations() -> dict[str, bool]:
    """Return for each operation of PyTorch whether it works on ``mps``: by its own kernel, or by other operations."""
    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    by_name = {str(function.func.name): function for function in parsed.native_functions}
    kernels = parsed.backend_indices[DispatchKey.MPS]

    def works(name: str) -> bool:
        function = by_name[name]
        if function.structured_delegate is not None:
            return works(str(function.structured_delegate))
        is_composite = (
            function.has_composite_implicit_autograd_kernel
            or function.has_composite_explicit_autograd_kernel
            or function.has_composite_explicit_autograd_non_functional_kernel
        )
        return is_composite or kernels.has_kernel(function)

    return {f"aten::{name}": works(name) for name in by_name}


def missing_operations(device: Apple) -> list[str]:
    """Return the operations that reached the device and that PyTorch does not have there."""
    known = known_operations()
    missing = []
    for name in sorted(device.operations):
        is_our_own = name.startswith(("shardtrain::", "prim::"))
        if not is_our_own and not known.get(name, False):
            missing.append(name)
    return missing


def apple_module() -> types.SimpleNamespace:
    """Return a module with the functions of ``torch.mps`` that the package may call."""
    return types.SimpleNamespace(synchronize=lambda: None, device_count=lambda: 1)


def as_apple(patch: pytest.MonkeyPatch) -> None:
    """Apply the rules of ``mps`` to the simulated device."""
    patch.setattr(accelerator, "APPLE", {NAME})
    patch.setattr(accelerator, "module", lambda _: apple_module())


class RowsOfExperts:
    """Answers how many rows each expert has, which the host reads: an equal share of the current rows."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._num_rows = 0
        forward = moe.Experts.forward

        def noted(module: Any, x_RD: Tensor, *inputs: Any) -> Any:
            self._num_rows = x_RD.size(0)
            return forward(module, x_RD, *inputs)

        patch.setattr(moe.Experts, "forward", noted)

    def answer(self, counts: Tensor) -> list[Any]:
        return [self._num_rows // counts.numel()] * counts.numel()


def config_of(changes: dict[str, Any]) -> Config:
    sections = {name: values for name, values in changes.items() if name != "model"}
    training = {"seq_len": 32, "local_batch_size": 2, "global_batch_size": 4}
    training |= sections.pop("training", {})
    config = tiny_config(training=training, **sections)
    model = changes.get("model", {})
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **model))


def problems_of_a_step(changes: dict[str, Any]) -> list[str]:
    """Run a step on the simulated device. Return what an Apple GPU could not compute."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.MonkeyPatch.context() as patch:
        as_apple(patch)
        world = World(0, 1, 0, accelerator.of_rank(NAME, 0))
        rows = RowsOfExperts(patch)
        answers = {"rows of each expert": rows.answer}
        with pretending(answers, Apple) as device, sdpa_kernel(SDPBackend.MATH):
            run = trainer.build(config_of(changes), world)
            outcome = trainer.step(run)
        assert outcome is not None
        assert outcome.loss_sum.device.type == NAME
        assert outcome.loss_sum.dtype == torch.float32
    dist.destroy_process_group()
    assert isinstance(device, Apple)
    assert device.operations
    return [*sorted(device.wide), *missing_operations(device)]


@pytest.mark.parametrize(
    "name", cases(["llama3", "mixtral"], nightly=sorted(CASES.keys() - {"llama3", "mixtral"}))
)
def test_a_step_needs_only_what_an_apple_gpu_has(name):
    assert in_a_fork(problems_of_a_step, CASES[name]) == []


def problems_of_generation() -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        as_apple(patch)
        # All numbers that the host reads from the simulated device are zeros.
        patch.setattr(sampling, "_require_finite", lambda _: None)
        module = find("llama3")
        sizes = module.Config(**module.FLAVORS["debugmodel"])
        with pretending(kind=Apple) as device, sdpa_kernel(SDPBackend.MATH):
            with torch.device(NAME):
                model = module.Model(sizes)
            generator = Generator(model, module.LAYOUT)
            generator.generate([[1, 2, 3], [4, 5]], 3)
            generator.generate([[1, 2, 3]], 3, Sampling(temperature=1.0, top_k=5, top_p=0.9))
    assert isinstance(device, Apple)
    return [*sorted(device.wide), *missing_operations(device)]


def test_generation_needs_only_what_an_apple_gpu_has():
    assert in_a_fork(problems_of_generation) == []


def test_a_float64_tensor_is_reported():
    def report() -> list[str]:
        with pretending(kind=Apple) as device:
            torch.ones(3, device=NAME).double()
        assert isinstance(device, Apple)
        return sorted(device.wide)

    assert in_a_fork(report) != []


def test_the_list_of_operations_has_some_that_apple_lacks():
    known = known_operations()
    assert known["aten::mm"]
    assert known["aten::_fused_adamw_"]
    assert known["aten::softmax.int"]
    assert not known["aten::linalg_eig"]


@pytest.mark.parametrize(
    ("section", "option", "value"),
    [
        ("compile", "enable", True),
        ("checkpoint", "async_mode", "async_with_pinned_mem"),
        ("training", "dtype", "bfloat16"),
        ("training", "mixed_precision_reduce", "bfloat16"),
        ("training", "enable_cpu_offload", True),
        ("parallelism", "fsdp_reshard_after_forward", "always"),
    ],
)
def test_options_without_support_are_refused(section, option, value):
    config = config_of({section: {option: value}})
    config = dataclasses.replace(
        config, training=dataclasses.replace(config.training, device="mps")
    )
    problems = problems_of(Loaded(config), 1, "mps", 1)

    assert [problem.option for problem in problems] == [f"{section}.{option}"]
    assert "mps" in str(problems[0])


def test_several_ranks_are_refused():
    config = config_of({"training": {"device": "mps", "global_batch_size": -1}})
    problems = problems_of(Loaded(config), 2, "mps", 1)
    assert "training.device" in [problem.option for problem in problems]
    assert "one process" in " ".join(map(str, problems))
