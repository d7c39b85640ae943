"""QK-clip (MuonClip; Kimi K2 technical report, arXiv 2507.20534): bound the attention logits.

If the largest logit S of a head in a step exceeds the threshold, the head's rows of the query and key weights
are scaled after the update. The same activations would then have the largest logit ``threshold``. With
f = threshold / S, rows are multiplied by f ** power. The method
``qk_clip_powers`` of an attention module returns the power of each row of a head: 1/2 for queries and keys,
and 1 for rotary queries whose keys all heads share. Query heads that share a key head also share S.

Shape suffixes: t tokens of this rank, N query heads, n query heads of this rank, K key-value heads, H head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardtrain.config.schema import Config
from shardtrain.distributed.compile import EAGER_ATTENTION
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.context_parallel.gather import gathered_keys
from shardtrain.distributed.context_parallel.masks import chunks_of
from shardtrain.distributed.mesh import LOSS_AXES, Mesh
from shardtrain.layout import Layout
from shardtrain.ops import document_mask
from shardtrain.ops.attention_logits import max_attention_logits
from shardtrain.ops.dtensor import local_slices, local_tensor
from shardtrain.utils.errors import ConfigError, Problem

OPTION = "optimizer.qk_clip_threshold"
METHOD = "qk_clip_powers"


def check(model: nn.Module, layout: Layout) -> None:
    """Check that an unsplit model has attention whose weights QK-clip can scale.

    Raises:
        ConfigError: it has no attention core, or an attention module without the method, or all attention
            modules normalize queries and keys.
    """
    paths = context_parallel.core_paths(model, layout.context)
    if not paths:
        rule = "requires the attention core, which LAYOUT.context of the model does not name"
        raise _refusal(rule, "name it there, or remove the option")
    has_powers = False
    for path in paths:
        attention = _attention_of(model, path)
        if not hasattr(attention, METHOD):
            rule = f"requires the method {METHOD} of {path.rpartition('.')[0] or 'the model'}"
            raise _refusal(rule, "add it (docs/own_model.md), or remove the option")
        has_powers = has_powers or bool(getattr(attention, METHOD)())
    if not has_powers:
        rule = "has no effect on a model that normalizes queries and keys, because weights do not scale its logits"
        raise _refusal(rule, "remove the option")


class QKClip:
    """Measures the largest logits of this rank's attention cores in training, and clips after an update."""

    def __init__(self, mesh: Mesh, config: Config) -> None:
        self._mesh = mesh
        self._threshold = config.optimizer.qk_clip_threshold
        self._is_compiled = bool(config.compile.enable)
        self._is_balanced = context_parallel.is_balanced(config)
        self._powers: dict[str, Mapping[str, Sequence[float]]] = {}
        """Path of an attention module -> its linear layers and the powers of the rows of a head."""
        self._largest_n: dict[str, Tensor] = {}
        """Path of an attention module -> the largest logits of this rank's tokens and heads in this step."""
        self._largest_logit = torch.zeros((), device=mesh.device)
        self._num_clipped = torch.zeros((), device=mesh.device)

    def apply(self, module: nn.Module, layout: Layout) -> None:
        """Let each attention core of the model or of a pipeline stage measure its logits.

        Call it after context parallelism has replaced the cores, and before recomputation and compilation.
        """
        for path in context_parallel.core_paths(module, layout.context):
            powers = getattr(_attention_of(module, path), METHOD)()
            if not powers:
                continue
            attention_path = path.rpartition(".")[0]
            self._powers[attention_path] = powers
            core: Any = module.get_submodule(path)
            core.forward = self._measured(attention_path, core)
            if self._is_compiled:
                core.forward = torch.compiler.disable(core.forward, reason=EAGER_ATTENTION)

    def reset(self) -> None:
        """Forget the logits of the step."""
        self._largest_n.clear()

    @torch.no_grad()
    def clip(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Scale the weights of heads whose largest logit exceeds the threshold (a collective).

        Args:
            parameters: this rank's parameters by name, after the update.
        """
        if not self._powers:
            return
        # Place the heads of this rank among all heads, and take the maximum over all tokens.
        tp_size = self._mesh.size("tp")
        largest = []
        for path in self._powers:
            largest_n = self._largest_n[path]
            num_heads = largest_n.numel()
            start = self._mesh.rank("tp") * num_heads
            largest_N = largest_n.new_full((tp_size * num_heads,), -torch.inf)
            largest_N[start : start + num_heads] = largest_n
            largest.append(largest_N)
        joined = self._mesh.max(torch.cat(largest), over=(*LOSS_AXES, "tp"))
        self._largest_logit = joined.max()
        self._num_clipped = (joined > self._threshold).sum()
        for path, largest_N in zip(
            self._powers, joined.split([part.numel() for part in largest]), strict=True
        ):
            self._scale(path, largest_N, parameters)

    def measures(self) -> dict[str, float]:
        """Return the largest logit and the number of clipped heads of the last update (a collective)."""
        largest = self._mesh.max(self._largest_logit, over=("pp",))
        num_clipped = self._mesh.sum(self._num_clipped, over=("pp",))
        return {
            "max_attention_logit": float(largest),
            "qk_clipped_heads": float(num_clipped),
        }

    def _measured(self, path: str, core: Any) -> Callable[..., Tensor]:
        """Return the forward of a core that also measures its logits."""
        forward = core.forward

        def measured(q: Tensor, k: Tensor, v: Tensor, *others: Any, **keywords: Any) -> Tensor:
            # Validation runs without gradients, and is not measured.
            if torch.is_grad_enabled():
                documents_BT = others[0] if others else keywords.get("documents_BT")
                with torch.no_grad():
                    self._measure(path, core, q.detach(), k.detach(), documents_BT)
            return forward(q, k, v, *others, **keywords)  # type: ignore[no-any-return]

        return measured

    def _measure(
        self, path: str, core: Any, q: Tensor, k: Tensor, documents_BT: Tensor | None
    ) -> None:
        """Update the largest logits with those of a call."""
        if getattr(core, "heads_first", False):
            q = q.transpose(1, 2)
            k = k.transpose(1, 2)
        scale = getattr(core, "scale", None)
        if scale is None:
            scale = q.size(-1) ** -0.5
        window = int(getattr(core, "window", 0) or 0)
        chunk = int(getattr(core, "chunk", 0) or 0)
        size = self._mesh.size("cp")
        tokens = q.size(1) * size
        documents_BT = document_mask.chunked(documents_BT, chunk, (q.size(0), tokens), q.device)
        chunks: tuple[int, ...] = (0,)
        if size > 1:
            k = gathered_keys(k, self._mesh.group("cp"), self._is_balanced)
            chunks = chunks_of(self._mesh.rank("cp"), size, self._is_balanced)
        # Selective recomputation must find the same operations in both forward passes. So the first call of
        # a step also computes a maximum, with -inf.
        if path not in self._largest_n:
            dtype = torch.promote_types(q.dtype, torch.float32)
            self._largest_n[path] = q.new_full((q.size(2),), -torch.inf, dtype=dtype)
        # Each chunk of queries attends to the keys up to its end.
        length = q.size(1) // len(chunks)
        for q_BlNH, index in zip(q.split(length, dim=1), chunks, strict=True):
            stop = (index + 1) * length
            documents_Bs = None if documents_BT is None else documents_BT[:, :stop]
            largest_n = max_attention_logits(q_BlNH, k[:, :stop], documents_Bs, window, scale)
            self._largest_n[path] = torch.maximum(self._largest_n[path], largest_n)

    def _scale(self, path: str, largest_N: Tensor, parameters: Mapping[str, nn.Parameter]) -> None:
        """Scale the rows of the query and key weights of an attention module."""
        powers_by_layer = self._powers[path]
        heads_by_layer = {}
        for layer, powers in powers_by_layer.items():
            heads_by_layer[layer] = parameters[f"{path}.{layer}.weight"].size(0) // len(powers)
        # Query heads that share a key head have the same factor.
        num_groups = min(heads_by_layer.values())
        largest_K = largest_N.unflatten(0, (num_groups, -1)).amax(1)
        factor_K = torch.where(
            largest_K > self._threshold, self._threshold / largest_K, torch.ones_like(largest_K)
        )
        for layer, powers in powers_by_layer.items():
            factor_N = factor_K.repeat_interleave(heads_by_layer[layer] // num_groups)
            factors = (factor_N[:, None] ** factor_N.new_tensor(powers)).flatten()
            for name in (f"{path}.{layer}.weight", f"{path}.{layer}.bias"):
                if name not in parameters:
                    continue
                local = local_tensor(parameters[name])
                local_factors = factors[local_slices(parameters[name])[0]].to(local.device)
                local.mul_(local_factors if local.ndim == 1 else local_factors[:, None])


def _attention_of(model: nn.Module, core_path: str) -> nn.Module:
    """Return the module that calls a core."""
    return model.get_submodule(core_path.rpartition(".")[0])


def _refusal(rule: str, fix: str) -> ConfigError:
    return ConfigError(Problem(OPTION, None, rule, fix))
