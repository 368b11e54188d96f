"""The compiler of grammars: from what a request demands to a matcher of tokens, by llguidance."""

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jaxserve.core.errors import RequestError
from jaxserve.core.reasoning import ReasoningSection
from jaxserve.core.structured import NOTHING_LEFT, Grammar, StructuredOutput
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.structured.errors import plain
from jaxserve.structured.limits import LIMITS
from jaxserve.structured.reasoning import ReasonedGrammar
from jaxserve.structured.trial import GrammarTrials, Tried

FORBIDDEN = "doesn't satisfy the grammar"  # what llguidance says of a token that is not allowed
CACHED = 256  # compiled grammars, the least recently used ones are dropped
CACHED_BYTES = 512 * 1024 * 1024


class LLGrammarCompiler:
    """A compiler of grammars for a tokenizer (`core.structured.GrammarCompiler`). Grammars are cached."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]):
        """`eos_token_ids` end an answer."""
        self._tokenizer, self._eos_token_ids = tokenizer, tuple(dict.fromkeys(eos_token_ids))
        self._cache: OrderedDict[tuple[str, str], CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._prepared: LLTokenizer | None = None
        self._trials = GrammarTrials(tokenizer.vocab_size, tokenizer.special_tokens, next(iter(eos_token_ids), 0))

    def compile(self, structured: StructuredOutput) -> "CompiledGrammar":
        """Return the grammar, from the cache if it has it. Raise `RequestError` that says what is wrong where."""
        key = structured.kind, structured.text
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        tokenizer, tried = self._ll_tokenizer(), self._tried(structured)
        matcher = LLMatcher(tokenizer, tried.source, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that is too complex for its first token is refused, too
        if matcher.is_error():
            raise _refusal(structured, matcher.get_error())
        grammar = CompiledGrammar(matcher, tried.size)
        with self._lock:
            self._cache[key] = grammar
            while len(self._cache) > CACHED or sum(each.size for each in self._cache.values()) > CACHED_BYTES:
                self._cache.popitem(last=False)
        return grammar

    def _compiled(self, structured: StructuredOutput) -> "CompiledGrammar":
        """Return the grammar, compiled by recursion."""
        source = _source(structured, self._tokenizer)
        matcher = LLMatcher(self._ll_tokenizer(), source, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that is too complex for its first token is refused, too
        if matcher.is_error():
            for part in structured.loose_parts:
                self._compiled(part)  # raises the error of the part at fault
            raise _refusal(structured, matcher.get_error())
        return CompiledGrammar(matcher)

    def _tried(self, structured: StructuredOutput) -> Tried:
        """Return what a trial says of a grammar. Raise `RequestError` for the part at fault, else for the whole."""
        tried = self._run(structured, *structured.parts)
        if tried.error:
            self._run(structured, *structured.loose_parts)
            raise _refusal(structured, tried.error)
        return tried

    def _run(self, *demands: StructuredOutput) -> Tried:
        """Return what a trial says of the first demand. Raise `RequestError` for the first of the others at fault."""
        if not demands:
            return Tried()
        first, *others = self._trials.run(*((demand.kind, demand.text) for demand in demands))
        for demand, found in zip(demands[1:], others, strict=True):
            if found.error:
                raise _refusal(demand, found.error)
        return first

    def after_reasoning(self, grammar: Grammar | None, section: ReasoningSection) -> Grammar:
        """Return the grammar of answers that begin with reasoning and go on as `grammar` says; None: with any text."""
        return ReasonedGrammar(grammar, section, self._tokenizer, self._eos_token_ids)

    def prepare(self) -> None:
        """Read the vocabulary, which takes up to seconds for a large one, so that the first grammar need not wait."""
        with self._making:
            if self._prepared is None:
                vocabulary = _Vocabulary(self._tokenizer, self._eos_token_ids)
                self._prepared = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=list(self._eos_token_ids))
                self._trials.start()

    def _ll_tokenizer(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise RequestError("the model has no token that ends a text, which structured output needs")
        self.prepare()
        assert self._prepared is not None
        return self._prepared


class CompiledGrammar:
    """A grammar at the beginning of an answer."""

    def __init__(self, matcher: LLMatcher, size: int):
        """`size`: the memory that it takes, in bytes."""
        self.size = size
        self._matcher = matcher

    def start(self) -> "LLAnswer":
        return LLAnswer(self._matcher.deep_copy())


class LLAnswer:
    """The state of one answer in its grammar (`core.structured.Matcher`)."""

    static = False

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        message = plain(self._matcher.get_error())
        return NOTHING_LEFT if FORBIDDEN in message else message

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)

    def forced(self) -> Sequence[int]:
        return self._matcher.compute_ff_tokens()

    def fill(self, mask: np.ndarray) -> None:
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: mask.size]
        mask[: allowed.size], mask[allowed.size :] = allowed, 0
        if self._matcher.is_error():
            mask[:] = 0  # llguidance allows the end, as if the text were complete


class _Vocabulary:
    """A tokenizer as llguidance reads it."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]):
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._encode = tokenizer.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode(), add_special_tokens=False)


def _refusal(structured: StructuredOutput, message: str) -> RequestError:
    """Return the error for a client."""
    return RequestError(f"{structured.name} cannot be used: {plain(message)}", field=structured.name)
