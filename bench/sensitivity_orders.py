"""The rank of the LIS order, and of other rankings, among all orders of the bundled model's layers.

    python -m bench.sensitivity_orders --texts bench/out/sensitivity [--precisions int4,int3] [--held-out-tokens N]

`bench.sensitivity` writes the texts. Measures every assignment of full precision or one other precision to the layers
(256 for eight layers) on the held-out text. An order's cost is its KL to full precision, averaged over the number of
swapped layers.
"""

import argparse
from itertools import combinations, permutations
from pathlib import Path

import numpy as np

from jaxserve.calibration.sensitivity.chain import LayerChain
from jaxserve.calibration.sensitivity.curves import qualities
from jaxserve.calibration.sensitivity.measures import Measures
from jaxserve.calibration.sensitivity.profile import Weights
from jaxserve.calibration.sensitivity.run import Options, rank_layers
from jaxserve.calibration.texts import read_rows
from jaxserve.checkpoint import open_checkpoint
from jaxserve.core.bundled import bundled_model_path
from jaxserve.engine.tokenizer import Tokenizer

LENGTH = 256
RANKINGS = {  # (weights, positions, calibration tokens)
    "LIS": (Weights(), "all", 4096),
    "LIS, 1024 tokens": (Weights(), "all", 1024),
    "LIS at last positions": (Weights(), "last", 4096),
    "LTS alone": (Weights(1, 0, 0), "all", 4096),
    "LRS alone": (Weights(0, 1, 0), "all", 4096),
    "MDS alone, greedy": (Weights(0, 0, 1), "all", 4096),
    "LRS and MDS": (Weights(0, 1, 1), "all", 4096),
}


def main() -> None:
    """Print a table in Markdown for each precision."""
    options = _options()
    folder = bundled_model_path()
    checkpoint, tokenizer = open_checkpoint(folder, dtype="float32"), Tokenizer.load(folder)
    chain = LayerChain(checkpoint, lambda number, precision: checkpoint.variant(f"layers.{number}", precision))
    layers = range(checkpoint.config.num_layers)
    held_out = read_rows(options.texts / "held_out.txt", tokenizer, LENGTH, options.held_out_tokens // LENGTH).tokens
    sets = [frozenset(chosen) for count in range(len(layers) + 1) for chosen in combinations(layers, count)]
    for precision in options.precisions.split(","):
        kl = {swapped: values[1] for swapped, values in qualities(chain, held_out, precision, sets).items()}

        def cost(order: tuple[int, ...], kl: dict[frozenset[int], float] = kl) -> float:
            inner = sum(kl[frozenset(order[:count])] for count in layers[1:])
            return float((inner + kl[frozenset(layers)] / 2) / len(layers))

        costs = np.sort([cost(order) for order in permutations(layers)])
        print(f"\n{precision}: of all {len(costs)} orders the best {costs[0]:.5f}, mean {costs.mean():.5f}, "
              f"worst {costs[-1]:.5f}\n")  # fmt: skip
        print("| ranking | order | KL, nats | orders that are better, % |\n| --- | --- | ---: | ---: |")
        for name, (weights, positions, tokens) in RANKINGS.items():
            rows = read_rows(options.texts / "calibration.txt", tokenizer, LENGTH, tokens // LENGTH).tokens
            measures = Measures(chain, rows[:, :-1], precision, positions)
            order = rank_layers(measures, Options(weights=weights), lambda what, steps: lambda: None).order
            better = 100 * np.searchsorted(costs, cost(order) - 1e-9) / len(costs)
            print(f"| {name} | {' '.join(map(str, order))} | {cost(order):.5f} | {better:.2f} |", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=Path, default=Path("bench/out/sensitivity"))
    parser.add_argument("--precisions", default="int4,int3")
    parser.add_argument("--held-out-tokens", type=int, default=2048)
    return parser.parse_args()


if __name__ == "__main__":
    main()
