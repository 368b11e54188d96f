"""What it costs to serve a model's layers rounded to fewer bits, as a value and as a file. Reading it loads no JAX."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

from jaxserve.core.errors import CheckpointError
from jaxserve.core.files import read_json_object, write_file

FILE_NAME = "rounding-costs.json"
FORMAT = 1


@dataclass(frozen=True)
class RoundingCost:
    """The loss on the model's own text with some of its layers in a precision, in nats a token."""

    layers: tuple[int, ...]
    rounded: float
    prepared: float  # with the same layers as `jaxserve quantize` would make them
    cross_entropy: float  # of full precision

    def by_layer(self, parts: Sequence[float]) -> tuple[float, ...]:
        """Return what each layer adds, as a share of the cross-entropy. Layers are assumed to add it as `parts` say."""
        factor = self.rounded / self.cross_entropy / sum(parts[layer] for layer in self.layers)
        return tuple(factor * part for part in parts)

    def text(self, precision: str, num_layers: int, command: str) -> str:
        """Return one line that says what rounding costs, and which command makes it less, if one does."""
        which = "layers" if len(self.layers) == num_layers else f"{len(self.layers)} layers"
        line = (
            f"{which} rounded to {precision} cost about {self.rounded:.2g} nats a token "
            f"({self.rounded / self.cross_entropy:+.1%}".replace("%", " %")
            + ") on the model's own text"
        )
        return f"{line}; `{command}` lowers it to {self.prepared:.2g}" if self.prepared < self.rounded else line


def save_costs(path: Path, model: str, costs: Mapping[str, RoundingCost]) -> None:
    """Write the costs by precision for a model with this fingerprint. Raise `ConfigError` if that fails."""
    content = {"format": FORMAT, "model": model, "costs": {name: asdict(cost) for name, cost in costs.items()}}
    write_file(path, json.dumps(content))


def load_costs(path: Path, model: Callable[[], str]) -> dict[str, RoundingCost]:
    """Return the costs by precision that a file has of a model; {} if it has none. `model` returns its fingerprint."""
    try:
        content = read_json_object(path, missing_ok=True)
        if content.get("format") != FORMAT or content.get("model") != model():
            return {}
        costs = {
            name: RoundingCost(**{**cost, "layers": tuple(cost["layers"])}) for name, cost in content["costs"].items()
        }
    except (CheckpointError, KeyError, TypeError, AttributeError):
        return {}
    return {name: cost for name, cost in costs.items() if _is_valid(cost)}


def _is_valid(cost: RoundingCost) -> bool:
    numbers = (cost.rounded, cost.prepared, cost.cross_entropy)
    return all(isinstance(x, float | int) and isfinite(x) for x in numbers) and cost.cross_entropy > 0
