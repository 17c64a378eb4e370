# pyright: basic
"""TRL's log-probabilities of tokens, which it computes chunk by chunk of the vocabulary.

TRL's function writes products into tiles with `out=`, or runs Triton kernels; torch traces neither.
On a GPU it selects the counted rows by their labels, so that shapes depend on the data. Here it is
a product and a softmax, which a plan can shard or split into chunks.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import functional as F


class LogProbabilities:
    """Replaces TRL's autograd function of this name by plain ops, which autograd differentiates."""

    @staticmethod
    def apply(
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        softcap: float | None = None,
        scale: float = 1.0,
        outputs: Collection[str] = (),
    ) -> tuple[Tensor | None, ...]:
        """Return log-probabilities of the targets, entropies, the log of the summed squares of
        probabilities, mean logits, and is-top-1 flags; the latter four are None if not asked for.

        hidden: rows x width. weight: vocabulary x width. targets: rows.
        """
        del chunk_size
        z = F.linear(hidden, weight, bias).float() * scale
        if softcap is not None:
            z = softcap * torch.tanh(z / softcap)
        z = z / temperature
        logs = z.log_softmax(-1)
        chosen = logs.gather(-1, targets[:, None])[:, 0]
        free = logs.detach()
        more = {
            "entropy": lambda: -(logs.exp() * logs).sum(-1),
            "log_sum_sq_probs": lambda: (2 * free).logsumexp(-1),
            "mean_logits": lambda: z.detach().mean(-1),
            "is_top1": lambda: free.argmax(-1) == targets,
        }
        return chosen, *(make() if name in outputs else None for name, make in more.items())
