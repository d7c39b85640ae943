"""Detection of state that a model sets in ``__init__`` and that training would lose. Such models are rejected.

A model is built on the meta device, so its tensors have no values. Training then replaces its parameters
with sharded ones with the distributions of ``initial()``, and sets its buffers to zero.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from shardtrain.layout import Layout, matches

_DRAWS = {
    *(name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")),
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "random_",
}  # fmt: skip
"""Functions that set random values of a tensor: those of torch.nn.init, and methods of tensors."""
_SETS_NO_VALUE = ("requires_grad_", "detach_", "share_memory_")
_NOT_ZERO = (
    *("ones", "ones_like", "new_ones", "full", "full_like", "new_full", "rand", "randn"),
    *("tensor", "as_tensor", "arange", "linspace", "logspace", "eye"),
)
"""Functions that create a tensor with values other than zero."""
_TORCH = Path(torch.__file__).parent
_INIT_FILE = str(_TORCH / "nn" / "init.py")
_PLUMBING = (
    _INIT_FILE,
    str(_TORCH / "overrides.py"),
    str(_TORCH / "utils" / "_device.py"),
    __file__,
)
"""Files of the stack frames between the code that sets a value and ``Values``, which observes the call."""
_STATE_DICT_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Values(TorchFunctionMode):
    """Function mode that records the function that set each tensor's values, for building a model on the meta device.

    It also skips random initialization. PyTorch would import its compiler to compute the shapes, which
    takes 0.5 s.
    """

    def __init__(self) -> None:
        super().__init__()
        self._set_by: dict[int, tuple[str, bool, Any]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # The functions of nn.init call it ``tensor``.
        target = args[0] if args else kwargs.get("tensor")
        name = getattr(func, "__name__", "")
        if isinstance(target, Tensor) and target.is_meta:
            self._note_write(func, name, target)
            if name in _DRAWS:
                return target
        result = func(*args, **kwargs)
        if name in _NOT_ZERO and isinstance(result, Tensor):
            self._note(name, result, sys._getframe())
        if name == "__set__" and _attribute_of(func) == "data":
            self._note("data", args[0], sys._getframe())
        return result

    def set_by(self, tensor: Tensor) -> tuple[str, bool]:
        """Return the function that set a tensor's values ("" if none), and True if the model's own code called it."""
        name, is_own, _ = self._set_by.get(_storage(tensor), ("", False, None))
        return name, is_own

    def _note_write(self, func: Any, name: str, tensor: Tensor) -> None:
        """Record a function if it sets values of a tensor in place."""
        frame = sys._getframe(1)
        # On the meta device, orthogonal_ and trunc_normal_ return after reading is_meta.
        caller = frame.f_back
        if (
            _attribute_of(func) == "is_meta"
            and caller is not None
            and caller.f_code.co_filename == _INIT_FILE
        ):
            self._note(caller.f_code.co_name.removeprefix("_no_grad_"), tensor, frame)
        in_place = name.endswith("_") and not name.endswith("__") and name not in _SETS_NO_VALUE
        if in_place or name == "__setitem__":
            self._note(name if in_place else "an assignment to a slice", tensor, frame)

    def _note(self, name: str, tensor: Tensor, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename in _PLUMBING:
            frame = frame.f_back
        # Do not report default values of layers from PyTorch or installed libraries: training should
        # replace them.
        file = Path(frame.f_code.co_filename if frame else "")
        is_own = _TORCH not in file.parents and "site-packages" not in file.parts
        # Keep a reference to the storage, because the address of a freed storage is reused.
        self._set_by[_storage(tensor)] = (name, is_own, tensor.untyped_storage())


def _attribute_of(function: Any) -> str:
    """Return the attribute of tensors that a function gets or sets, "data" for ``Tensor.data.__set__``."""
    return getattr(getattr(function, "__self__", None), "__name__", "")


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def unsupported_parameters(model: nn.Module) -> list[str]:
    """Return a message for each parameter without a shape, and for each weight computed from other parameters."""
    sentences = [
        f"parameter {name} has no shape; set its sizes in __init__ (for example, nn.Linear instead of nn.LazyLinear)"
        for name, parameter in model.named_parameters()
        if isinstance(parameter, UninitializedParameter)
    ]
    for path, module in model.named_modules():
        before = {type(hook).__module__ for hook in module._forward_pre_hooks.values()}
        if hasattr(module, "parametrizations") or before & {
            "torch.nn.utils.weight_norm",
            "torch.nn.utils.spectral_norm",
        }:
            sentences.append(
                f"{path} computes its weight from other parameters (parametrize, weight_norm, spectral_norm), which a "
                "layout does not support; compute it in forward, as F.linear(x, F.normalize(self.weight, dim=-1))"
            )
    return sentences


def lost(model: nn.Module, layout: Layout, values: Values) -> list[str]:
    """Return a message for each value, hook or attribute set in ``__init__`` that would be lost in training."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    sharing = _sharing(model)
    sentences = [
        f"parameters {one} and {other} share memory, but would be separate in training; tie them by registering one "
        f"parameter twice ({other} = {one}), or use separate memory"
        for one, other in sharing
    ]
    for name, parameter in model.named_parameters():
        function, is_own = values.set_by(parameter)
        # A parameter built from torch.ones or a similar function is a placeholder that initial() replaces.
        if (
            function
            and is_own
            and function not in _NOT_ZERO
            and not any(name in pair for pair in sharing)
        ):
            sentences.append(
                f"__init__ sets values of parameter {name} (with {function}), but initial() overwrites them; "
                "remove that, and define the initial values in initial()"
            )
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            sentences.append(
                f"__init__ registers a hook on the gradient of parameter {name}, which its shards would lose; change "
                "the gradient with a torch.autograd.Function in forward, or in your own optimizer"
            )
        sentences += [
            f"__init__ sets the attribute {attribute} of parameter {name}, which its shards would lose; store it "
            "on the module"
            for attribute in vars(parameter)
        ]
    for name, buffer in model.named_buffers():
        function, _ = values.set_by(buffer)
        if not any(matches(name, pattern) for pattern in layout.buffers):
            sentences.append(
                f"buffer {name} would lose its values; compute it in forward, or add it to LAYOUT.buffers if it "
                "starts at zero"
            )
        elif function in _NOT_ZERO or function in _DRAWS - {"zeros_"}:
            sentences.append(
                f"buffer {name} in LAYOUT.buffers must start at zero, but __init__ sets it with {function}; compute it "
                "in forward, or use torch.zeros"
            )
    for path, module in model.named_modules():
        owner = path or "the model"
        sentences += [
            f"__init__ registers a hook of state_dict or load_state_dict on {owner}, but checkpoints call neither; "
            "remove it"
            for kind in _STATE_DICT_HOOKS
            if getattr(module, kind)
        ]
        for name, value in vars(module).items():
            # Lists and dictionaries of a module may contain tensors too.
            leaves = [] if name in ("_parameters", "_buffers", "_modules") else tree_leaves(value)
            meta_tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_meta]
            parameter_name = names.get(id(meta_tensors[0])) if meta_tensors else None
            if parameter_name is not None:
                sentences.append(
                    f"{owner} stores parameter {parameter_name} as the plain attribute {name}, which its shards do "
                    "not replace; register it there as a parameter, or read it from the module that owns it"
                )
            elif meta_tensors:
                sentences.append(
                    f"{owner} stores a tensor as {name}, which would lose its values; compute it in forward"
                )
    return sentences


def _sharing(model: nn.Module) -> list[tuple[str, str]]:
    """Return pairs of distinct parameters that share memory, for example through ``nn.Parameter(other.data)``."""
    seen: dict[int, list[tuple[str, int, int]]] = {}
    pairs = []
    for name, parameter in model.named_parameters():
        # the range from the first to the last element within the storage
        first = int(parameter.storage_offset())
        last = first
        for size, step in zip(parameter.shape, parameter.stride(), strict=True):
            last += int(size - 1) * step
        others = seen.setdefault(_storage(parameter), [])
        for other, start, end in others:
            if first <= end and start <= last:
                pairs.append((other, name))
        others.append((name, first, last))
    return pairs
