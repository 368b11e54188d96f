"""Least squares with coefficients from 0, of measurements some of which are off. numpy alone."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROUNDS = 20
TOLERATED = 3.0  # deviations that count in full
MIN_DEVIATION = 0.01  # relative; below it measurements agree


def robust(columns: Floats, wanted: Floats, likely: Floats) -> Floats:
    """The x >= 0 for which `columns` x is near `wanted` [N], all above 0; relative to what x predicts.

    Relative to the prediction and not to the measurement, or small values would count for more than large ones and
    predictions be too low. Huber's weights: what is further off than `TOLERATED` standard deviations (told from the
    median) counts linearly, so that a step in which the machine did something else does not bend the rest; nearer ones
    count as in least squares, and what is predicted is their mean. `likely` x is to be near 0 too; one row of it
    weighs as much as one measurement.
    """
    weights = 1 / wanted**2
    solution = np.zeros(columns.shape[1])
    for _ in range(ROUNDS):
        weighted = columns * weights[:, None]
        solution = non_negative(weighted.T @ columns + likely.T @ likely, weighted.T @ wanted)
        predicted = np.maximum(columns @ solution, 0.1 * wanted)
        off = np.abs(wanted / predicted - 1)
        limit = TOLERATED * max(1.4826 * float(np.median(off)), MIN_DEVIATION)
        weights = np.minimum(1.0, limit / np.maximum(off, 1e-12)) / predicted**2
    return solution


def non_negative(gram: Floats, moment: Floats) -> Floats:
    """The x >= 0 with the least x' `gram` x / 2 - `moment`' x, by an active set (Bro and de Jong, 1997)."""
    scale = np.sqrt(np.maximum(np.diag(gram), 1e-300))
    gram, moment = gram / np.outer(scale, scale) + 1e-12 * np.eye(len(scale)), moment / scale
    solution, free = np.zeros_like(moment), np.zeros(len(moment), bool)
    enough = 1e-10 * np.abs(moment).max(initial=0.0)
    for _ in range(10 * len(moment)):
        slope = np.where(free, -np.inf, moment - gram @ solution)
        if slope.max(initial=-np.inf) <= enough:
            break
        free[slope.argmax()] = True
        while True:
            trial = np.zeros_like(solution)
            trial[free] = np.linalg.solve(gram[np.ix_(free, free)], moment[free])
            below = free & (trial <= 0)
            if not below.any():
                break
            step = (solution[below] / (solution[below] - trial[below])).min()
            solution = np.where(free, solution + step * (trial - solution), 0.0)
            free &= solution > 1e-14
        solution = trial
    return solution / scale
