"""Trials of grammars in another process, before the engine's own process compiles them.

Nothing in llguidance bounds the compilation of a grammar: a chain of rules overflows the stack, which ends the whole
process, and an expression of some kilobytes can take minutes and gigabytes. The process of this module therefore
compiles each new grammar first, in a fork with limits on time, memory and stack.
"""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO, Protocol

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jaxserve.structured.errors import NO_TOKEN, plain
from jaxserve.structured.limits import LIMITS
from jaxserve.structured.schemas import grammar_fault
from jaxserve.structured.source import GrammarSource, any_json, grammar_source

CPU_SECONDS = 1.0  # grammars of tools take some milliseconds, and a list of 10,000 choices 0.2 seconds
MEMORY_BYTES = 256 * 1024 * 1024  # beside what the process takes without a grammar
STACK_BYTES = 1536 * 1024  # less than any thread of the engine's process has
MAX_MESSAGE = 2000  # characters; the messages of nested rules grow with the square of their depth
MAX_DROPPED = 32  # pointers
TOO_LARGE = (
    f"it takes too much to compile: more than {CPU_SECONDS:g} second of processor time, {MEMORY_BYTES >> 20} MiB of "
    f"memory or {STACK_BYTES >> 10} KiB of stack"
)
INTERSECTION = re.compile(r"^([A-Z][A-Z0-9_]*): (.* & .*)$", re.MULTILINE)  # a terminal of several expressions
OUT_OF_TIME = "out of time"  # the process's answer for a trial that took longer than it may

Demand = tuple[str, str, bool]
"""A `StructuredOutput`'s kind, text and strictness."""


@dataclass(frozen=True)
class Tried:
    """The result of a trial: the source of a grammar for llguidance, and the memory in bytes that it takes compiled.

    `error`: why the grammar cannot be used, "" if it can. `dropped`: JSON pointers to what it leaves out of schemas, at
    most `MAX_DROPPED`.
    """

    source: str = ""
    size: int = 0
    error: str = ""
    dropped: Sequence[str] = ()


class Trials(Protocol):
    """The process that tries grammars before the engine's process compiles them."""

    def start(self) -> None:
        """Get ready, so that the first grammar need not wait."""
        ...

    def run(self, *demands: Demand, seconds: float = CPU_SECONDS) -> list[Tried] | None:
        """Compile grammars within some seconds of CPU time, None if that does not suffice.

        The limits are for all of them together. If they exceed one of memory or nesting, the first has the error.
        """
        ...


class GrammarTrials:
    """Tries grammars in a process that starts with the first of them, one call after another. Thread-safe."""

    def __init__(self, vocab_size: int, special: Mapping[str, int], eos_token_id: int, niceness: int = 0):
        """`special`: the ids of the tokenizer's special tokens by text."""
        self._vocabulary = _Vocabulary(vocab_size, dict(special), eos_token_id)
        self._niceness = niceness
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(self, *demands: Demand, seconds: float = CPU_SECONDS) -> list[Tried] | None:
        with self._lock:
            answers = _ask(self._running(), [seconds, demands])
        if answers == OUT_OF_TIME:
            return None
        if answers is None:
            return [Tried(error=TOO_LARGE), *(Tried() for _ in demands[1:])]
        return [Tried(**answer) for answer in answers]

    def start(self) -> None:
        with self._lock:
            self._running()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", __name__, str(self._niceness)]
            # A session of its own: Ctrl-C is for the engine, at whose end the process ends as well.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                start_new_session=True,
            )
            weakref.finalize(self, _end, self._process)
            _ask(self._process, asdict(self._vocabulary))
        return self._process


def _ask(process: subprocess.Popen[bytes], question: Any) -> Any:
    """Return the process's answer, None if it could not give one."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(question).encode() + b"\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline() or "null")
    except (BrokenPipeError, ValueError):
        return None


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


@dataclass
class _Vocabulary:
    """A vocabulary of all bytes after as many tokens as the real one has: compiling depends on nothing else of it."""

    vocab_size: int
    special: dict[str, int]
    eos_token_id: int
    bos_token_id: int | None = None
    special_token_ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.special_token_ids = sorted({*self.special.values(), self.eos_token_id})

    @property
    def tokens(self) -> list[bytes]:
        """The bytes of each token."""
        texts = {token: text.encode() for text, token in self.special.items()}
        real = [texts.get(token, b"\xff%d" % token) for token in range(self.vocab_size)]
        return [*real, *(bytes([byte]) for byte in range(256))]

    def __call__(self, text: str | bytes) -> list[int]:
        return [self.vocab_size + byte for byte in (text.encode() if isinstance(text, str) else text)]


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer the questions of `GrammarTrials`, the first of which is the vocabulary, until nobody asks any more."""
    if not (first := questions.readline()).endswith(b"\n"):
        return  # the engine has ended already
    given = json.loads(first)
    vocabulary = _Vocabulary(given["vocab_size"], given["special"], given["eos_token_id"])
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.eos_token_id)
    answers.write(b"true\n")
    answers.flush()
    for question in questions:
        reading, writing = os.pipe()
        if not (child := os.fork()):
            seconds, demands = json.loads(question)
            _limit(seconds)
            with open(writing, "wb") as pipe:
                tried = [asdict(_tried(demand, vocabulary, tokenizer)) for demand in demands]
                pipe.write(json.dumps(tried).encode())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        answers.write((json.dumps(OUT_OF_TIME if late else None).encode() if status else answer) + b"\n")
        answers.flush()


def _limit(seconds: float) -> None:
    """Limit this process: it ends where it exceeds a limit, and with SIGPROF after some seconds of CPU time."""
    limits = {
        resource.RLIMIT_AS: _pages(0) + MEMORY_BYTES,
        resource.RLIMIT_STACK: STACK_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where Rust says that memory is missing


def _tried(demand: Demand, vocabulary: _Vocabulary, tokenizer: LLTokenizer) -> Tried:
    kind, text, strict = demand
    before = _pages(1)
    try:
        source = grammar_source(kind, text, strict, vocabulary.special)
        matcher = _matcher(source, tokenizer)
        if matcher.is_error() and kind == "json" and not strict:  # such as a schema that refers to nothing but itself
            source = any_json(text)
            matcher = _matcher(source, tokenizer)
    except (ValueError, RecursionError) as error:
        return Tried(error=grammar_fault(kind, text, str(error))[:MAX_MESSAGE])
    if matcher.is_error():
        return Tried(error=grammar_fault(kind, text, matcher.get_error())[:MAX_MESSAGE])
    if dead := _dead_terminal(source.text, tokenizer):
        return Tried(error=f"no text can follow all of {dead}"[:MAX_MESSAGE])
    dropped = [*source.dropped, *dict.fromkeys(map(plain, matcher.get_grammar_warnings()))]
    return Tried(source.text, max(0, _pages(1) - before), dropped=dropped[:MAX_DROPPED])


def _matcher(source: GrammarSource, tokenizer: LLTokenizer) -> LLMatcher:
    """Return a matcher that has been used once, since some errors show only then."""
    matcher = LLMatcher(tokenizer, source.text, log_level=0, limits=LIMITS)
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _dead_terminal(grammar: str, tokenizer: LLTokenizer) -> str:
    """Return the expressions of a terminal that no text matches all of, at which answers would break off, "" if none.

    llguidance sees this itself only at the beginning of an answer.
    """
    for line in INTERSECTION.finditer(grammar):
        alone = LLMatcher.grammar_from_lark(f"start: {line[1]}\n{line[0]}")
        if _matcher(GrammarSource(alone), tokenizer).get_error().startswith(NO_TOKEN):
            return line[2]
    return ""


def _pages(column: int) -> int:
    """Return the bytes of this process by the column of /proc/self/statm: 0: virtual, 1: resident. 0 elsewhere."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[column]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    os.nice(int(sys.argv[1]))
    try:
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    except BrokenPipeError:
        os._exit(0)  # the engine has ended; writing out what is left would fail again
