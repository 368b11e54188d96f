"""Quality by number of swapped layers, for given orders of swapping. Axes: N sequences of S tokens, E hidden."""

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.calibration.sensitivity.chain import Hidden, LayerChain, logits
from jaxserve.calibration.sensitivity.profile import BACK, FRONT, LIS, MDS, RANDOM, LayerScores, QualityCurve
from jaxserve.console.progress import Begin, ignore_phases

STREAM_BYTES = 2 << 30  # of all hidden states in memory
Set = frozenset[int]


def orders(scores: LayerScores, seeds: int) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the orders of swapping to compare, by name, with one random order for each seed."""
    front = tuple(range(len(scores.order)))
    random = (np.random.default_rng(seed).permutation(len(front)) for seed in range(seeds))
    return {
        LIS: (scores.order,),
        MDS: (scores.mds_order,),
        FRONT: (front,),
        BACK: (front[::-1],),
        RANDOM: tuple(tuple(order.tolist()) for order in random),
    }


def points(num_layers: int, max_points: int) -> tuple[int, ...]:
    """Return the numbers of swapped layers at which to measure quality: at most `max_points` from 0 to all, evenly."""
    return tuple(sorted({round(x) for x in np.linspace(0, num_layers, min(max_points, num_layers + 1))}))


def curves(
    chain: LayerChain,
    rows: Int[np.ndarray, "N S+1"],
    precision: str,
    compared: dict[str, tuple[tuple[int, ...], ...]],
    at: Sequence[int],
    begin: Begin = ignore_phases,
) -> dict[str, tuple[QualityCurve, ...]]:
    """Measure the quality along each order, at the numbers `at` of swapped layers."""
    sets = {frozenset(order[:count]) for group in compared.values() for order in group for count in at}
    found = qualities(chain, rows, precision, sets, begin)

    def curve(order: tuple[int, ...]) -> QualityCurve:
        values = np.array([found[frozenset(order[:count])] for count in at]).T
        return QualityCurve(tuple(at), *(tuple(line.tolist()) for line in values))

    return {name: tuple(map(curve, group)) for name, group in compared.items()}


def qualities(
    chain: LayerChain,
    rows: Int[np.ndarray, "N S+1"],
    precision: str,
    sets: Iterable[Set],
    begin: Begin = ignore_phases,
) -> dict[Set, Float[np.ndarray, "3"]]:
    """Return (cross-entropy, KL to full precision, top-1 agreement) for each set of swapped layers.

    The values are means over all tokens. Sets that agree in the layers so far share their hidden states. Sequences are
    processed in groups whose hidden states fit into `STREAM_BYTES`.
    """
    sets = {Set(), *sets}
    totals = {swapped: np.zeros(3) for swapped in sets}
    groups = row_groups(chain, rows, len(sets))
    num_steps = len(groups) * chain.config.num_layers + len(rows)
    done = begin(f"{precision}: loss of {len(sets)} sets of layers", num_steps)
    head = chain.head
    for group in groups:
        streams: dict[Set, Hidden] = {Set(): chain.embed(group[:, :-1])}
        for index in range(chain.config.num_layers):
            streams = _next_layer(chain, index, precision, sets, streams)
            done()
        for row, targets in enumerate(group[:, 1:]):
            full = _full(*head, streams[Set()][row])
            for swapped in sets:
                totals[swapped] += _quality(*head, full, streams[swapped][row], targets)
            done()
    return {swapped: total / rows[:, 1:].size for swapped, total in totals.items()}


def row_groups(chain: LayerChain, rows: np.ndarray, streams: int) -> list[np.ndarray]:
    """Split the sequences into groups whose hidden states fit into memory `streams` times.

    All groups but the last have the same size.
    """
    row_bytes = streams * (rows.shape[1] - 1) * chain.config.hidden_size * 4
    size = max(1, STREAM_BYTES // row_bytes)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _next_layer(
    chain: LayerChain, index: int, precision: str, sets: Collection[Set], streams: dict[Set, Hidden]
) -> dict[Set, Hidden]:
    """Return the hidden states after a layer, by the set of layers swapped so far."""
    below = Set(range(index + 1))
    outputs, layers = {}, {True: chain.layer(index, precision), False: chain.layer(index, None)}
    for swapped in {below & chosen for chosen in sets}:
        outputs[swapped] = layers[index in swapped](streams[swapped - {index}])
    return outputs


class _Full(NamedTuple):
    """The outputs of one sequence in full precision, the reference of quality."""

    logits: Float[Array, "S V"]
    log_sum: Float[Array, "S"]
    probabilities: Float[Array, "S V"]


@partial(jax.jit, static_argnums=0)
def _full(graph: nnx.GraphDef, state: nnx.State, x: Float[Array, "S E"]) -> _Full:
    z = logits(graph, state, x)
    log_sum = jax.nn.logsumexp(z, axis=-1)
    return _Full(z, log_sum, jnp.exp(z - log_sum[:, None]))


@partial(jax.jit, static_argnums=0)
def _quality(
    graph: nnx.GraphDef, state: nnx.State, full: _Full, x: Float[Array, "S E"], targets: Int[Array, "S"]
) -> Float[Array, "3"]:
    """Return the measures of `qualities` summed over the tokens of a sequence."""
    z = logits(graph, state, x)
    log_sum = jax.nn.logsumexp(z, axis=-1)
    losses = log_sum - jnp.take_along_axis(z, targets[:, None], axis=-1)[:, 0]
    kl = jnp.sum(full.probabilities * (full.logits - z), axis=-1) - (full.log_sum - log_sum)
    agree = full.logits.argmax(-1) == z.argmax(-1)
    return jnp.stack([losses.sum(), kl.sum(), agree.sum(dtype=jnp.float32)])
