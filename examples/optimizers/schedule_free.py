"""Schedule-Free AdamW: an average of the weights replaces the decay of the learning rate (Defazio et al. 2024,
arXiv 2405.15682).

Gradients are computed at y = (1 - beta1) z + beta1 x. AdamW without momentum updates z, and x is the weighted
average of all z. The parameters of the model are y, and the optimizer state contains z. Validation, samples,
checkpoints and exports use x, which ``evaluation_weights`` computes. Set ``lr_scheduler.decay_ratio = 0``. The
learning rate then stays constant after the warmup.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Optimizer:
    schedule_free_r: float = 0.0
    """Exponent of the step in the weight of a step's z in the average."""
    schedule_free_lr_power: float = 2.0
    """Exponent of the largest learning rate so far in this weight. It reduces the weight of warmup steps."""


@dataclass
class JobConfig:
    optimizer: Optimizer = field(default_factory=Optimizer)


class ScheduleFreeAdamW(torch.optim.Optimizer):
    def __init__(self, groups, options):
        super().__init__(groups, {"lr": options.lr})
        self.beta1 = options.beta1
        self.beta2 = options.beta2
        self.eps = options.eps
        # The options only have these fields if job.custom_config_module names this file.
        self.r = getattr(options, "schedule_free_r", Optimizer.schedule_free_r)
        self.lr_power = getattr(options, "schedule_free_lr_power", Optimizer.schedule_free_lr_power)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["weight_decay"])

    def _update(self, y, lr, weight_decay):
        state = self.state[y]
        # The weights may have been loaded after the state was created.
        if state["step"] == 0:
            state["z"].copy_(y)
        state["step"] += 1
        step = int(state["step"])

        # Compute the share of this step's z in the average x.
        lr_max = max(lr, float(state["lr_max"]))
        state["lr_max"].fill_(lr_max)
        weight = step**self.r * lr_max**self.lr_power
        state["weight_sum"] += weight
        weight_sum = float(state["weight_sum"])
        share = weight / weight_sum if weight_sum > 0 else 0.0

        # Compute the direction of AdamW without momentum.
        state["exp_avg_sq"].mul_(self.beta2).addcmul_(y.grad, y.grad, value=1 - self.beta2)
        denominator = state["exp_avg_sq"].div(1 - self.beta2**step).sqrt_().add_(self.eps)
        direction = y.grad.div(denominator).add_(y, alpha=weight_decay)

        # Update y and z. The new y equals (1 - beta1) z + beta1 x, but x is not computed.
        y.lerp_(state["z"], share)
        y.add_(direction, alpha=lr * (self.beta1 * (1 - share) - 1))
        state["z"].sub_(direction, alpha=lr)

    def evaluation_weights(self, parameter):
        """Return x, from y and z."""
        state = self.state[parameter]
        if state["step"] == 0:
            return parameter.detach().clone()
        return parameter.detach().lerp(state["z"], 1 - 1 / self.beta1)


def build(param_groups, options):
    return ScheduleFreeAdamW(param_groups, options)


def initial_state(parameter):
    return {
        "z": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
        "step": torch.zeros(()),
        "lr_max": torch.zeros((), dtype=torch.float64),
        "weight_sum": torch.zeros((), dtype=torch.float64),
    }
