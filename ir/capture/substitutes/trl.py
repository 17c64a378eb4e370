# pyright: basic
"""TRL's log-probabilities of tokens, which it computes chunk by chunk of the vocabulary.

Its own function writes products into tiles with `out=`, or runs kernels of Triton, neither of which
torch traces, and on a GPU it picks the rows that count by their labels, so that shapes depend on
data. Written out it is a product and a softmax, that a plan shards, or puts in chunks.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.nn import functional as F


class LogProbabilities:
    """Stands for TRL's autograd function; autograd differentiates what it computes."""

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
        """Log-probabilities of the targets, entropies, and the logarithm of summed squares of
        probabilities, mean logits and whether the target is the likeliest; None if not asked for.

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
