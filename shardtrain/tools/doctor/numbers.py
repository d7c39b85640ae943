"""Numbers: accuracy of long sums on each rank's device, with functions of the trainer.

Accuracy depends on the processor and driver. An inaccurate gradient norm changes the clipping factor.
``shardtrain verify --real`` tests more functions, at larger sizes and on more ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.result import Facts, Finding, Judged, Reports, each

if TYPE_CHECKING:
    import torch

AREA = "numbers"

NUMBERS = {"cpu": 1 << 23, "accelerator": 1 << 26}
"""Number of elements of the gradient."""
VOCABULARY = 128256
TOKENS = {"cpu": 32, "accelerator": 512}
LIMIT = 1e-6
"""Maximum relative error, compared with float64."""
_BLOCK = 1 << 22


def collect(context: RankContext, facts: Facts) -> None:
    """Record the errors of a gradient norm and a loss, compared with float64."""
    import torch

    device = context.torch_device()
    # Each rank draws different numbers, so together the ranks test more sums.
    generator = torch.Generator(device).manual_seed(context.rank)
    context.line.mark("a gradient norm")
    gradient = torch.randn(NUMBERS[context.kind], generator=generator, device=device)
    facts["numbers"] = gradient.numel()
    facts["norm_error"] = norm_error(gradient)
    context.line.mark("a sum of losses")
    logits = torch.randn(TOKENS[context.kind], VOCABULARY, generator=generator, device=device)
    targets = torch.randint(0, VOCABULARY, (len(logits),), generator=generator, device=device)
    facts["tokens"], facts["vocabulary"] = logits.shape
    facts["loss_error"] = loss_error(logits, targets)


def norm_error(gradient: torch.Tensor) -> float:
    """Return the relative error of the trainer's gradient norm, compared with float64."""
    from shardtrain.ops.dtensor import squared_norm

    # Convert in blocks, because a full float64 copy takes twice the gradient's memory.
    exact_square = 0.0
    for block in gradient.split(_BLOCK):
        exact_square += float(block.double().square().sum())
    computed_square = float(squared_norm([gradient]))
    return abs((computed_square / exact_square) ** 0.5 - 1)


def loss_error(logits_NV: torch.Tensor, targets_N: torch.Tensor) -> float:
    """Return the relative error of the trainer's sum of losses, compared with float64."""
    from shardtrain.ops.cross_entropy import cross_entropy_sum

    # Convert one row at a time, because all logits in float64 take twice the memory.
    exact = 0.0
    for row_V, target in zip(logits_NV, targets_N, strict=True):
        logits_V = row_V.double()
        exact += float(logits_V.logsumexp(0) - logits_V[target])
    computed = float(cross_entropy_sum(logits_NV, targets_N))
    return abs(computed / exact - 1)


def judge(reports: Reports) -> Iterator[Finding]:
    """Check that both errors are within the limit on every rank. NaN fails."""
    yield from each(reports, AREA, {"gradient norm": _norm, "loss sum": _loss})


def _norm(facts: Facts) -> Judged:
    return _judge(facts["norm_error"], f"{facts['numbers']:,} numbers")


def _loss(facts: Facts) -> Judged:
    return _judge(facts["loss_error"], f"{facts['tokens']:,} tokens x {facts['vocabulary']:,}")


def _judge(error: float, size: str) -> Judged:
    expected = f"within {LIMIT:g} of float64"
    # A comparison with NaN is false, so NaN fails.
    if error <= LIMIT:
        return "pass", f"{expected}, {size}", expected, ""
    fix = "run shardtrain verify --real; use another version of PyTorch or of the driver, or exclude this host"
    return "fail", f"{error:.1e} from float64, {size}", expected, fix
