"""Which configuration promises most: expected improvement, weighed by the chance to fit."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr

from shardweave.planners.oppa.space import Floats

_SQRT_2_PI = float(np.sqrt(2 * np.pi))


def expected_improvement(mean: Floats, variance: Floats, best: float) -> Floats:
    """E[max(r - best, 0)] for normal r; of no variance, max(mean - best, 0)."""
    gain = mean - best
    deviation = np.sqrt(np.maximum(variance, 0.0))  # (22) lacks the root
    is_known = deviation == 0
    z = gain / np.where(is_known, 1.0, deviation)
    density = np.exp(-0.5 * z * z) / _SQRT_2_PI
    expected = gain * ndtr(z) + deviation * density
    return np.where(is_known, np.maximum(gain, 0.0), np.maximum(expected, 0.0))


def chance_below(mean: Floats, variance: Floats, limit: float) -> Floats:
    """P(m <= limit) for normal m."""
    deviation = np.sqrt(np.maximum(variance, 0.0))
    is_known = deviation == 0
    chance: Floats = ndtr((limit - mean) / np.where(is_known, 1.0, deviation))
    return np.where(is_known, (mean <= limit).astype(np.float64), chance)


def constrained_improvement(
    throughput: tuple[Floats, Floats], memory: tuple[Floats, Floats], best: float, limit: float
) -> Floats:
    """E[max(r - best, 0)] P(m <= limit); each belief is (mean, variance). best: of what fitted."""
    return expected_improvement(*throughput, best) * chance_below(*memory, limit)
