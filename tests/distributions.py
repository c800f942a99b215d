"""Comparison of random samples. Seeds are fixed, so that the result is reproducible."""

import math

import numpy as np


def same_distribution(one: np.ndarray, other: np.ndarray) -> bool:
    """Two-sample Kolmogorov-Smirnov test of samples [n] and [m] at the 0.1 % level.

    Ties make the test less strict.
    """
    places = np.sort(np.concatenate([one, other]))
    ours, theirs = (
        np.searchsorted(np.sort(x), places, side="right") / len(x) for x in (one, other)
    )
    return bool(abs(ours - theirs).max() < 1.95 * math.sqrt(1 / len(one) + 1 / len(other)))
