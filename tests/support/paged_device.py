"""A device without a model, whose tokens follow from what it reads in its KV pages.

A token depends on the sequence's own tokens alone. If a page holds anything else than it should, other tokens follow.
"""

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from jaxserve.core.request import Sequence
from jaxserve.core.work import Chunk, StepOutput, Work
from jaxserve.kvcache import NULL_PAGE, PageTable

VOCAB = 64


def digest(context: np.ndarray) -> int:
    return int.from_bytes(blake2b(context.astype(np.int32).tobytes(), digest_size=6).digest())


def next_token(context: np.ndarray, sequence: Sequence | None = None) -> int:
    """Return the token after `context`: any, or one that the sequence's matcher allows."""
    allowed = np.arange(VOCAB)
    if sequence is not None and sequence.matcher is not None:
        mask = np.zeros(VOCAB // 32, np.uint32)
        sequence.matcher.fill(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(allowed[digest(context) % len(allowed)])


class PagedDevice:
    """An `Executor` that stores tokens as keys and values."""

    def __init__(self, table: PageTable, pages: np.ndarray):
        """`pages` int32 [pages, page size] is changed in place."""
        self.table, self.pages = table, pages
        self.newest: dict[int, int] = {}  # by slot

    def execute(self, work: Work) -> "PagedStep":
        step = PagedStep(self, work)
        for sequence in work.decodes:
            known = sequence.num_inflight - sequence.num_known_inflight <= 1
            token = sequence.tokens[-1] if known else self.newest[sequence.slot]
            step.compute(sequence, sequence.num_computed - 1, [token], samples=True)
        for index, chunk in enumerate(work.chunks):
            tokens = chunk.sequence.tokens[chunk.start : chunk.start + chunk.length]
            step.compute(chunk.sequence, chunk.start, tokens, samples=chunk.last and chunk.sequence.request.generates)
            step.score(index, chunk)
        if not work.sampled_late:
            step.sample()
        return step

    def move(self, moves: dict[int, int]) -> None:
        """Copy pages: {source: target}."""
        self.pages[list(moves.values())] = self.pages[list(moves)]


@dataclass
class PagedStep:
    """A step whose tokens are known to the device, and to the host when it fetches them."""

    device: PagedDevice
    work: Work
    rows: list[tuple[Sequence, int, np.ndarray, bool]] = field(default_factory=list)  # slot, context, samples
    tokens: list[int] | None = None
    scores: dict[int, tuple[np.ndarray, ...]] = field(default_factory=dict)
    embeddings: dict[int, np.ndarray] = field(default_factory=dict)

    def compute(self, sequence: Sequence, start: int, tokens: list[int], *, samples: bool) -> None:
        """Write tokens to the pages of a sequence, and read all up to them."""
        pages, size = self.device.table.rows[sequence.slot], self.device.pages.shape[1]
        for position, token in enumerate(tokens, start):
            assert pages[position // size] != NULL_PAGE
            self.device.pages[pages[position // size], position % size] = token
        end = start + len(tokens)
        context = self.device.pages[pages[: -(-end // size)]].ravel()[:end].copy()
        self.rows.append((sequence, sequence.slot, context, samples))

    def score(self, index: int, chunk: Chunk) -> None:
        """Compute log-probabilities or the embedding of a prompt from the context of the newest row."""
        sequence, _, context, _ = self.rows[-1]
        if chunk.last and sequence.request.embed:
            self.embeddings[index] = np.float32([digest(context)])
        ends = range(chunk.start + 1, min(chunk.start + chunk.length, sequence.num_prompt - 1) + 1)
        if sequence.params.prompt_logprobs is not None and sequence.index == 0 and len(ends):
            values = np.array([-1.0 - digest(context[:end]) % 1000 for end in ends])
            ids = np.array([[next_token(context[:end])] for end in ends])
            self.scores[index] = (values, np.ones(len(ends), int), ids, values[:, None])

    def sample(self) -> None:
        self.tokens = []
        for sequence, slot, context, samples in self.rows:
            token = 0
            if samples and sequence.slot == slot and not sequence.num_known_inflight:
                token = self.device.newest[slot] = next_token(context, sequence)
            self.tokens.append(token)

    def fetch(self) -> StepOutput:
        if self.tokens is None:
            self.sample()
        assert self.tokens is not None
        return StepOutput(
            np.array(self.tokens), prompt_logprobs=self.scores or None, embeddings=self.embeddings or None
        )


class Burst:
    """The matcher of a grammar in which a token that 7 divides is followed by the ten tokens after it.

    Otherwise only even tokens are allowed.
    """

    static, ended, error = False, False, ""

    def __init__(self) -> None:
        self._due: list[int] = []

    def start(self) -> "Burst":
        return Burst()

    def accept(self, token: int) -> None:
        if self._due:
            assert token == self._due.pop(0)
        elif token % 7 == 0:
            self._due = [(token + step) % VOCAB for step in range(1, 11)]

    def forced(self) -> tuple[int, ...]:
        return tuple(self._due)

    def fill(self, mask: np.ndarray) -> None:
        bits = np.zeros(VOCAB, bool)
        bits[self._due[:1] or range(0, VOCAB, 2)] = True
        mask[:] = np.packbits(bits, bitorder="little").view(np.uint32)


class Letters:
    """A tokenizer of which every token is one letter."""

    def stream(
        self, skip_special_tokens: bool = True, *, start: bool = False, after: tuple[int, ...] = ()
    ) -> "Letters":
        return self

    def push(self, token_ids: tuple[int, ...]) -> str:
        return "".join(map(self.token, token_ids))

    def flush(self) -> str:
        return ""

    def token(self, token_id: int) -> str:
        return chr(ord("a") + token_id % 26)
