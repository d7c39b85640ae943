"""Lion: update each weight by the sign of an interpolated momentum (Chen et al. 2023, arXiv 2302.06675).

The state is one momentum per weight, which is half of AdamW's state. Use a learning rate 3 to 10 times lower than
for AdamW, a weight decay higher by the same factor, and ``optimizer.beta2 = 0.99``.
"""

from __future__ import annotations

import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, groups, options):
        super().__init__(groups, {"lr": options.lr})
        self.beta1 = options.beta1
        self.beta2 = options.beta2

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            lr = group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter]["exp_avg"]
                direction = momentum.lerp(parameter.grad, 1 - self.beta1).sign()
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.add_(direction, alpha=-lr)
                momentum.lerp_(parameter.grad, 1 - self.beta2)


def build(param_groups, options):
    return Lion(param_groups, options)


def initial_state(parameter):
    return {"exp_avg": torch.zeros_like(parameter)}
