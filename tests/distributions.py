"""Comparing samples of random draws. Seeds are fixed, so an answer is the same at every run."""

import math

import numpy as np


def same_distribution(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two samples [n], [m] pass the two-sample Kolmogorov-Smirnov test at the 0.1 % level; ties make it milder."""
    places = np.sort(np.concatenate([one, other]))
    ours, theirs = (
        np.searchsorted(np.sort(x), places, side="right") / len(x) for x in (one, other)
    )
    return bool(abs(ours - theirs).max() < 1.95 * math.sqrt(1 / len(one) + 1 / len(other)))
