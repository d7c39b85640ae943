"""Label smoothing and z-loss as additions to the cross-entropy of a token.

With logits z of V columns and lse = log sum exp z, the loss of a token with target t is

    (1 - e) (lse - z[t]) + e (lse - mean z) + w lse^2

where e is ``label_smoothing`` (Szegedy et al. 2016, section 7) and w is ``z_loss_weight`` (Chowdhery et
al. 2022, section 5). Its gradient is (1 + 2 w lse) softmax(z) - (1 - e) one_hot(t) - e / V. Without both,
this is the cross-entropy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from shardtrain.ops.accelerator import sum_dtype
from shardtrain.ops.targets import IGNORE


@dataclass(frozen=True)
class LossTerms:
    """Options of the additional terms. Both are 0 by default."""

    label_smoothing: float = 0.0
    z_loss_weight: float = 0.0

    @property
    def is_cross_entropy(self) -> bool:
        """True if there are no additional terms."""
        return not self.label_smoothing and not self.z_loss_weight

    def losses(self, lse_n: Tensor, target_n: Tensor, mean_n: Tensor) -> Tensor:
        """Return the loss of each token, (n,).

        Args:
            lse_n: log-sum-exp of the logits.
            target_n: logit of the target.
            mean_n: mean of the logits.
        """
        losses_n = lse_n - target_n
        if self.label_smoothing:
            losses_n = losses_n + self.label_smoothing * (target_n - mean_n)
        if self.z_loss_weight:
            losses_n = losses_n + self.z_loss_weight * lse_n.square()
        return losses_n

    def softmax_factor(self, lse_n: Tensor) -> Tensor:
        """Return the factor of the softmax in the gradient of each token, (n,)."""
        return 1 + 2 * self.z_loss_weight * lse_n

    def chunk_loss(
        self, logits_nV: Tensor, targets_n: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute one chunk of tokens: a ``ChunkFunction`` that compiles to a single kernel."""
        logits_nV = logits_nV.float()
        kept_n = targets_n != IGNORE
        index_n1 = targets_n.clamp_min(0).unsqueeze(1)
        lse_n = logits_nV.logsumexp(dim=-1)
        target_n = logits_nV.gather(1, index_n1).squeeze(1)
        losses_n = self.losses(lse_n, target_n, logits_nV.mean(dim=-1))
        loss = (losses_n * kept_n).sum(dtype=sum_dtype(losses_n.device))

        softmax_nV = (logits_nV - lse_n.unsqueeze(1)).exp()
        is_target_nV = torch.arange(logits_nV.size(1), device=logits_nV.device) == index_n1
        labels_nV = (
            1 - self.label_smoothing
        ) * is_target_nV + self.label_smoothing / logits_nV.size(1)
        gradient_nV = self.softmax_factor(lse_n).unsqueeze(1) * softmax_nV - labels_nV
        return loss, gradient_nV * (kept_n * weight).unsqueeze(1)


CROSS_ENTROPY = LossTerms()
