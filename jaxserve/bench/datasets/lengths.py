"""Lengths in tokens: fixed, or drawn from a distribution."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jaxserve.bench.vocabulary import MAX_PROMPT_TOKENS
from jaxserve.core.errors import ConfigError

PARAMETERS = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2}
FORMS = "N, fixed:N, uniform:LOW,HIGH, normal:MEAN,STD or lognormal:MEAN,STD"


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, with the kinds and parameters that `parse` reads."""

    kind: str
    parameters: tuple[float, ...]

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read lengths from text: "128", "fixed:128", "uniform:64,256", "normal:512,100" or "lognormal:512,400".

        Uniform lengths include both ends. Mean and standard deviation are those of the lengths, also for lognormal.
        Raise ConfigError if the text has another form or a length is out of range.
        """
        kind, colon, rest = text.strip().partition(":")
        kind, rest = (kind, rest) if colon else ("fixed", kind)
        try:
            parameters = tuple(float(part) for part in rest.split(","))
        except ValueError:
            parameters = ()
        if len(parameters) != PARAMETERS.get(kind) or not all(map(math.isfinite, parameters)):
            raise ConfigError(f"{text!r} is not a length in tokens: give {FORMS}")
        return cls(kind, parameters)._checked(text)

    @classmethod
    def around(cls, length: int, range_ratio: float = 0.0) -> "Lengths":
        """Return uniform lengths from length * (1 - range_ratio) to length * (1 + range_ratio), as in vLLM.

        Raise ConfigError if the ratio is not in [0, 1).
        """
        if not 0 <= range_ratio < 1:
            raise ConfigError(f"the range ratio is {range_ratio:g}: it must be at least 0 and below 1 (--range-ratio)")
        low, high = math.floor(length * (1 - range_ratio)), math.ceil(length * (1 + range_ratio))
        lengths = cls("uniform", (max(low, 1), high)) if range_ratio else cls("fixed", (length,))
        return lengths._checked(str(length))

    def sample(self, rng: np.random.Generator, n: int) -> NDArray[np.int64]:
        """Return random token counts [n], each at least 1."""
        tokens: NDArray[np.int64] = np.maximum(np.rint(self._drawn(rng, n)), 1).astype(np.int64)
        return tokens

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(f'{value:g}' for value in self.parameters)}"

    def _drawn(self, rng: np.random.Generator, n: int) -> NDArray[Any]:
        first, second = self.parameters[0], self.parameters[-1]
        match self.kind:
            case "fixed":
                return np.full(n, first)
            case "uniform":
                return rng.integers(int(first), int(second), size=n, endpoint=True)
            case "normal":
                return rng.normal(first, second, n)
            case _:
                # Of the logarithm, which is normally distributed.
                variance = math.log1p((second / first) ** 2)
                return rng.lognormal(math.log(first) - variance / 2, math.sqrt(variance), n)

    def _checked(self, text: str) -> "Lengths":
        """Return these lengths if their parameters are valid, and raise ConfigError otherwise."""
        # Fixed and uniform lengths are token counts, so they must be whole numbers.
        first, second = self.parameters[0], self.parameters[-1]
        whole = self.kind not in ("fixed", "uniform") or all(
            value.is_integer() for value in map(float, self.parameters)
        )
        ordered = second >= first if self.kind in ("fixed", "uniform") else second >= 0
        if first < 1 or not whole or not ordered or max(self.parameters) > MAX_PROMPT_TOKENS:
            raise ConfigError(
                f"{text!r} is not a length in tokens: give whole numbers from 1 to {MAX_PROMPT_TOKENS}, LOW <= HIGH"
            )
        return self
