"""Bytes and operations of a model that follow from the sizes in its config.json, without its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jaxserve.control.plan import StagePlan
from jaxserve.core.bundled import config_names, config_path
from jaxserve.core.config import DType
from jaxserve.core.errors import ConfigError
from jaxserve.core.files import parse_json, read_text
from jaxserve.core.kv_layout import int8_row_bytes
from jaxserve.core.model_name import model_name
from jaxserve.core.numeric import ceil_div
from jaxserve.core.precision import BITS
from jaxserve.core.scale_groups import default_group, group_size
from jaxserve.hub import Need, fetch, hub_name

ITEMSIZE: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
SCALE = 2  # bytes of a scale
UNIT = {8: 1, 4: 128, 3: 256}  # codes that are packed together, by bits of a code


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer with SwiGLU, all layers alike.

    Biases are left out: they are at most some 0.01 % of the bytes. Each of tp devices has its share of the weights,
    rounded up. A KV head is not cut but copied (`parallel.padding`).
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # of one expert, in a mixture of experts
    max_position: int
    tie_embeddings: bool
    dtype: DType = "bfloat16"
    num_experts: int = 0  # 0 for a dense feed-forward
    experts_per_token: int = 0

    @classmethod
    def load(cls, path: str | Path) -> "ModelShape":
        """Load a Hugging Face config.json, given by path, by its folder, or by a name in configs/models or on the hub.

        Raise `ConfigError`, which names file and field, if the model is unknown or the file is invalid, and
        `CheckpointError` if the hub does not provide it.
        """
        file = _find(path)
        given = parse_json(read_text(file), file)
        if not isinstance(given, dict):
            raise ConfigError(f"{file} is not a config.json: it must hold a JSON object")
        read = _Fields(file, given)
        heads, hidden = read.number("num_attention_heads"), read.number("hidden_size")
        experts = read.number("num_experts", read.number("num_local_experts", 0))
        inner = read.number("moe_intermediate_size", read.number("intermediate_size", 0)) if experts else 0
        return cls(
            name=model_name(file.parent) if file.name == "config.json" else file.stem,
            vocab_size=read.number("vocab_size"),
            hidden_size=hidden,
            num_layers=read.number("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=read.number("num_key_value_heads", heads),
            head_dim=read.number("head_dim", hidden // heads),
            intermediate_size=inner or read.number("intermediate_size"),
            max_position=read.number("max_position_embeddings", 2048),
            tie_embeddings=bool(given.get("tie_word_embeddings", False)),
            dtype=read.dtype(),
            num_experts=experts,
            experts_per_token=read.number("num_experts_per_tok", 8) if experts else 0,
        )

    # -- bytes on each of tp devices

    def layer_bytes(self, precision: str, tp: int = 1) -> int:
        """Return the bytes of a decoder layer's weights, with all experts. Router and norms keep full precision."""
        return self._other_bytes(precision, tp) + max(self.num_experts, 1) * self._expert_bytes(precision, tp)

    def read_bytes(self, precision: str, tokens: int, tp: int = 1) -> float:
        """Return the bytes of a decoder layer's weights that a step of `tokens` tokens reads.

        Experts that no token chooses are not read. Tokens are taken to choose their experts at random: n tokens that
        choose k of X experts each choose X (1 - (1 - k / X)^n) different ones.
        """
        if not self.num_experts:
            return self.layer_bytes(precision, tp)
        missed = (1 - self.experts_per_token / self.num_experts) ** tokens
        chosen = self.num_experts * (1 - missed)
        return self._other_bytes(precision, tp) + chosen * self._expert_bytes(precision, tp)

    def matrices(self, tp: int = 1) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each matrix that a decoder layer multiplies by; of one expert's, in a mixture."""
        return [*self._attention(tp), *self._feed_forward(tp)]

    def head_bytes(self, precision: str, tp: int = 1) -> int:
        """Return the bytes of the final norm and the output head."""
        rows = _share(self.vocab_size, tp)
        return self.hidden_size * self.itemsize + self._matrix_bytes(rows, self.hidden_size, precision)

    def embed_bytes(self, tp: int = 1, precision: str | None = None) -> int:
        """Return the bytes of the embedding, by default in full precision.

        A tied embedding is the weight of the head, and has its precision.
        """
        return self._matrix_bytes(_share(self.vocab_size, tp), self.hidden_size, precision or self.dtype)

    def stage_bytes(self, stage: StagePlan) -> int:
        """Return the bytes of all blocks of a stage. A tied embedding in the stage of the head counts once."""
        names, total = {block.block for block in stage.blocks}, 0
        for block in stage.blocks:
            if block.block == "head":
                total += self.head_bytes(block.precision, stage.tp)
            elif block.block != "embed":
                total += self.layer_bytes(block.precision, stage.tp)
            elif not (self.tie_embeddings and "head" in names):
                total += self.embed_bytes(stage.tp, block.precision)
        return total

    def kv_bytes_per_token(self, tp: int = 1, dtype: str = "auto", platform: str = "gpu") -> int:
        """Return the bytes of a token's key and value in the pool of one layer.

        `dtype` is that of the pool: "auto" for the dtype of the activations, or "int8".
        """
        row = int8_row_bytes(self.head_dim, platform) if dtype == "int8" else self.head_dim * self.itemsize
        return 2 * self._kv_heads(tp) * row

    @property
    def itemsize(self) -> int:
        """The bytes of a number in full precision."""
        return ITEMSIZE[self.dtype]

    # -- operations on each of tp devices

    def layer_ops(self, tp: int = 1) -> int:
        """Return the operations of a token in the matrix products of a decoder layer: 2 for each weight used.

        Of the experts, only those count that the token chooses.
        """
        chosen = self.experts_per_token if self.num_experts else 1
        sizes = [*self._attention(tp), *self._feed_forward(tp) * chosen]
        return 2 * (sum(outputs * inputs for outputs, inputs in sizes) + self.num_experts * self.hidden_size)

    def head_ops(self, tp: int = 1) -> int:
        """Return the operations of the output head for each row."""
        return 2 * _share(self.vocab_size, tp) * self.hidden_size

    def attention_ops(self, tp: int = 1) -> int:
        """Return the operations of attention in one layer for each pair of a query token and a key token."""
        return 4 * self._heads(tp) * self.head_dim

    # -- parts

    def _kv_heads(self, tp: int) -> int:
        return _share(self.num_kv_heads, tp)

    def _heads(self, tp: int) -> int:
        group, copies = self.num_heads // self.num_kv_heads, max(tp // self.num_kv_heads, 1)
        return self._kv_heads(tp) * _share(group, copies)

    def _attention(self, tp: int) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each attention matrix."""
        query, kv = self._heads(tp) * self.head_dim, self._kv_heads(tp) * self.head_dim
        return [(query + 2 * kv, self.hidden_size), (self.hidden_size, query)]

    def _feed_forward(self, tp: int) -> list[tuple[int, int]]:
        """Return (outputs, inputs) of each feed-forward matrix of one expert."""
        inner = _share(self.intermediate_size, tp)
        return [(2 * inner, self.hidden_size), (self.hidden_size, inner)]

    def _other_bytes(self, precision: str, tp: int) -> int:
        """Return the bytes of a layer's attention, norms and router."""
        norms_and_router = (2 + self.num_experts) * self.hidden_size * self.itemsize
        return norms_and_router + sum(self._matrix_bytes(*size, precision) for size in self._attention(tp))

    def _expert_bytes(self, precision: str, tp: int) -> int:
        return sum(self._matrix_bytes(*size, precision) for size in self._feed_forward(tp))

    def _wanted_group(self, bits: int) -> int:
        return default_group((self.hidden_size, self.num_heads * self.head_dim, self.intermediate_size), bits)

    def _matrix_bytes(self, outputs: int, inputs: int, precision: str) -> int:
        """Return the bytes of a matrix. Raise `ConfigError` if the precision is unknown."""
        bits = BITS.get(precision)
        if bits is not None:
            units, groups = ceil_div(inputs, UNIT[bits]), inputs // group_size(inputs, self._wanted_group(bits))
            return outputs * (units * UNIT[bits] * bits // 8 + groups * SCALE)
        if precision not in ITEMSIZE:
            raise ConfigError(f"unknown precision {precision!r}: choose from {', '.join((*ITEMSIZE, *BITS))}")
        return outputs * inputs * ITEMSIZE[precision]


@dataclass(frozen=True)
class _Fields:
    """The fields of a config.json, checked when they are read."""

    file: Path
    given: Mapping[str, Any]

    def number(self, key: str, default: int | None = None) -> int:
        value = self.given.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self.file}: {key} is {value!r}: it must be a whole number above 0")
        return value

    def dtype(self) -> DType:
        name = self.given.get("dtype") or self.given.get("torch_dtype") or "bfloat16"
        if name not in ITEMSIZE:
            raise ConfigError(f"{self.file}: unknown dtype {name!r}: choose from {', '.join(ITEMSIZE)}")
        return cast(DType, name)


def _find(source: str | Path) -> Path:
    """Return the config.json. Raise `ConfigError`, which lists the known models, if there is none."""
    file = config_path("models", Path(source) / "config.json") or config_path("models", source)
    if file is not None:
        return file
    if name := hub_name(source):
        return fetch(name, Need.CONFIG).folder / "config.json"
    known = ", ".join(config_names("models"))
    raise ConfigError(
        f"unknown model {str(source)!r}: give a config.json, a folder with one, a name on the hub (ORG/NAME), or one "
        f"of {known}"
    )


def _share(size: int, tp: int) -> int:
    """Return the part of `size` on each of `tp` devices, rounded up."""
    return ceil_div(size, tp)
