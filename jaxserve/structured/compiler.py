"""The compiler of grammars: from what a request demands to a matcher of tokens, by llguidance."""

import json
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jaxserve.core.errors import EngineStopped, RequestError
from jaxserve.core.panics import panics_as_exceptions
from jaxserve.core.reasoning import ReasoningSection
from jaxserve.core.structured import NOTHING_LEFT, Grammar, StructuredOutput
from jaxserve.engine.tokenizer import Tokenizer
from jaxserve.structured.errors import CANNOT_WRITE, NO_TOKEN, plain, vocabulary_fault
from jaxserve.structured.lanes import Lanes, Unfinished
from jaxserve.structured.limits import LIMITS
from jaxserve.structured.reasoning import ReasonedGrammar
from jaxserve.structured.source import any_json
from jaxserve.structured.trial import CPU_SECONDS, TOO_LARGE, GrammarTrials, Trials, Tried

log = logging.getLogger(__name__)
FORBIDDEN = "doesn't satisfy the grammar"  # what llguidance says of a token that is not allowed
CACHED = 256  # compiled grammars, the least recently used ones are dropped
CACHED_BYTES = 512 * 1024 * 1024
MAX_LISTED, MAX_SHOWN = 8, 120  # places in a line of the log, and characters of each


class LLGrammarCompiler:
    """A compiler of grammars for a tokenizer (`core.structured.GrammarCompiler`). Grammars are cached."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]):
        """`eos_token_ids` end an answer."""
        self._tokenizer, self._eos_token_ids = tokenizer, tuple(dict.fromkeys(eos_token_ids))
        self._cache = GrammarCache()
        self._making = threading.Lock()
        self._prepared: LLTokenizer | None = None
        vocabulary = tokenizer.vocab_size, tokenizer.special_tokens, next(iter(eos_token_ids), 0)
        self._lanes = Lanes(lambda niceness: GrammarTrials(*vocabulary, niceness), _weakly(self))

    def compile(self, structured: StructuredOutput) -> "CompiledGrammar":
        """Return the grammar, from the cache if it has it. Raise `RequestError` that says what is wrong where."""
        return self.submit(structured).result()

    def submit(self, structured: StructuredOutput, sender: str = "") -> "Future[CompiledGrammar]":
        """Return the future of the grammar, as `core.structured.GrammarCompiler`."""
        if not self._eos_token_ids:
            raise RequestError("the model has no token that ends a text, which structured output needs")
        if (known := self._cache.get(structured)) is None:
            return self._lanes.submit(structured, sender)
        future: Future[CompiledGrammar] = Future()
        if isinstance(known, CompiledGrammar):
            future.set_result(known)
        else:
            future.set_exception(known.error_for(structured))
        return future

    def compile_within(self, structured: StructuredOutput, trials: Trials, seconds: float) -> "CompiledGrammar":
        """Return the grammar, whose trial takes at most some seconds of CPU time. Raise `Unfinished` or `RequestError`.

        Another request may have compiled it since this one began to wait.
        """
        if (known := self._cache.get(structured)) is None:
            known = self._new(structured, trials, seconds)
            self._cache.put(structured, known)
        if isinstance(known, Refused):
            raise known.error_for(structured)
        return known

    def _new(self, structured: StructuredOutput, trials: Trials, seconds: float) -> "CompiledGrammar | Refused":
        tried, *parts = self._tried((structured, *structured.parts), trials, seconds)
        for part, found in enumerate(parts):
            if found.error:
                return Refused(found.error, part)
        if tried.error == TOO_LARGE and structured.kind == "json" and not structured.strict:
            tried = _without_schema(structured.text) or tried
        compiled = Refused(tried.error) if tried.error else self._compiled(tried)
        if isinstance(compiled, Refused) and structured.fallback is not None:
            instead = structured.fallback(lambda each: [found.error for found in self._tried(each, trials, seconds)])
            return self.compile_within(instead, trials, seconds)
        if isinstance(compiled, CompiledGrammar):
            _note_dropped(structured, [*structured.dropped, *tried.dropped])
        return compiled

    def _tried(self, demands: Sequence[StructuredOutput], trials: Trials, seconds: float) -> list[Tried]:
        """Return the results of trials. If they take too long together, the first has the error."""
        results = trials.run(*((each.kind, each.text, each.strict) for each in demands), seconds=seconds)
        if results is None and seconds < CPU_SECONDS:
            raise Unfinished
        return results or [Tried(error=TOO_LARGE), *(Tried() for _ in demands[1:])]

    def _compiled(self, tried: Tried) -> "CompiledGrammar | Refused":
        matcher = LLMatcher(self._ll_tokenizer(), tried.source, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that is too complex for its first token is refused, too
        if matcher.is_error():
            return Refused(vocabulary_fault(tried.source, matcher.get_error()))
        return CompiledGrammar(matcher, tried.size)

    def after_reasoning(self, grammar: Grammar | None, section: ReasoningSection) -> Grammar:
        """Return the grammar of answers that begin with reasoning and go on as `grammar` says; None: with any text."""
        return ReasonedGrammar(grammar, section, self._tokenizer, self._eos_token_ids)

    def prepare(self) -> None:
        """Read the vocabulary, which takes up to seconds for a large one, so that the first grammar need not wait."""
        with self._making:
            if self._prepared is None:
                vocabulary = _Vocabulary(self._tokenizer, self._eos_token_ids)
                with panics_as_exceptions():
                    self._prepared = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=list(self._eos_token_ids))
                self._lanes.start()

    def _ll_tokenizer(self) -> LLTokenizer:
        self.prepare()
        assert self._prepared is not None
        return self._prepared


def _without_schema(text: str) -> Tried | None:
    """Return the grammar of any JSON in place of a schema that is too large, None if the schema is no JSON."""
    try:
        source = any_json(text)
    except (ValueError, RecursionError):
        return None
    return Tried(source.text, dropped=source.dropped)


def _weakly(compiler: LLGrammarCompiler) -> Callable[[StructuredOutput, Trials, float], "CompiledGrammar"]:
    """Return the compiler's method without a circle of references, so that its processes end with it."""
    found = weakref.WeakMethod(compiler.compile_within)

    def compile_within(structured: StructuredOutput, trials: Trials, seconds: float) -> CompiledGrammar:
        method = found()
        if method is None:
            raise EngineStopped("the engine has been closed")
        return method(structured, trials, seconds)

    return compile_within


class CompiledGrammar:
    """A grammar at the beginning of an answer."""

    def __init__(self, matcher: LLMatcher, size: int):
        """`size`: the memory that it takes, in bytes."""
        self.size = size
        self._matcher = matcher

    def start(self) -> "LLAnswer":
        return LLAnswer(self._matcher.deep_copy())


@dataclass(frozen=True)
class Refused:
    """A grammar that cannot be used. `part`: the index of the one of `StructuredOutput.parts` that is at fault."""

    message: str
    part: int | None = None
    size = 0

    def error_for(self, structured: StructuredOutput) -> RequestError:
        """Return the error for a client."""
        named = structured if self.part is None else structured.parts[self.part]
        return RequestError(f"{named.name} cannot be used: {self.message}", field=named.name)


class GrammarCache:
    """The compiled grammars and the refusals that were used last. Thread-safe."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, str, bool], CompiledGrammar] = OrderedDict()
        self._refused: OrderedDict[tuple[str, str, bool], Refused] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, structured: StructuredOutput) -> "CompiledGrammar | Refused | None":
        """Return what is known of a demand, None if nothing is."""
        key = structured.kind, structured.text, structured.strict
        with self._lock:
            for known in (self._known, self._refused):
                if key in known:
                    known.move_to_end(key)
                    return known[key]
        return None

    def put(self, structured: StructuredOutput, grammar: "CompiledGrammar | Refused") -> None:
        """Keep a result, and drop those that were used longest ago."""
        key = structured.kind, structured.text, structured.strict
        with self._lock:
            if isinstance(grammar, Refused):
                self._refused[key] = grammar
                if len(self._refused) > CACHED:
                    self._refused.popitem(last=False)
                return
            self._known[key] = grammar
            while len(self._known) > CACHED or sum(each.size for each in self._known.values()) > CACHED_BYTES:
                self._known.popitem(last=False)


class LLAnswer:
    """The state of one answer in its grammar (`core.structured.Matcher`)."""

    static = False

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher
        self._allowed: np.ndarray | None = None  # as llguidance said of the next token
        self._forbidden = NOTHING_LEFT

    @property
    def ended(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str:
        message = self._matcher.get_error()
        if message.startswith(NO_TOKEN):  # as the grammar has been tried, it is not at fault
            return CANNOT_WRITE
        return self._forbidden if FORBIDDEN in message else plain(message)

    def accept(self, token: int) -> None:
        allowed, self._allowed = self._allowed, None
        if not self._matcher.consume_token(token) and allowed is not None and _has(allowed, token):
            # llguidance allows any token where no token has the bytes that must come next.
            self._forbidden = CANNOT_WRITE

    def forced(self) -> Sequence[int]:
        return self._matcher.compute_ff_tokens()

    def fill(self, mask: np.ndarray) -> None:
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: mask.size]
        self._allowed = allowed
        mask[: allowed.size], mask[allowed.size :] = allowed, 0
        if self._matcher.is_error():
            mask[:] = 0  # llguidance allows the end, as if the text were complete


def _has(mask: np.ndarray, token: int) -> bool:
    word, bit = divmod(token, 32)
    return word < mask.size and bool(int(mask[word]) >> bit & 1)


class _Vocabulary:
    """A tokenizer as llguidance reads it. Raise `RequestError` if the bytes of its tokens are not known."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int]):
        if not tokenizer.knows_bytes:
            raise RequestError(
                "structured output cannot be used with this model: its tokenizer does not show which bytes each token"
                " stands for (the decoder in tokenizer.json)"
            )
        self.eos_token_id = eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._encode = tokenizer.encode_inside

    def __call__(self, text: str | bytes) -> list[int]:
        """Return tokens whose bytes are exactly those of a text inside another, as far as there are such tokens."""
        text = text if isinstance(text, str) else text.decode()
        ids, data = self._encode(text), text.encode()
        return ids if b"".join([self.tokens[id] for id in ids]) == data else self._longest_first(data)

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        ids_of, longest = self._ids_of
        while data:
            sizes = range(min(len(data), longest), 0, -1)
            size = next((size for size in sizes if data[:size] in ids_of), 0)
            if not size:
                break
            ids.append(ids_of[data[:size]])
            data = data[size:]
        return ids

    @cached_property
    def _ids_of(self) -> tuple[dict[bytes, int], int]:
        """The ids of ordinary tokens by their bytes, and the length of the longest."""
        special = set(self.special_token_ids)
        ids = {data: id for id, data in reversed(list(enumerate(self.tokens))) if data and id not in special}
        return ids, max(map(len, ids), default=0)


def _note_dropped(structured: StructuredOutput, dropped: Sequence[str]) -> None:
    """Write into the log what a grammar leaves out. Names from a schema are cut, and escaped as in JSON."""
    if dropped:
        shown = [json.dumps(each[:MAX_SHOWN])[1:-1] for each in dropped[:MAX_LISTED]]
        more = f" and {len(dropped) - MAX_LISTED} more" if len(dropped) > MAX_LISTED else ""
        log.warning("%s: answers are not held to %s%s", structured.name, ", ".join(shown), more)
