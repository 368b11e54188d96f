"""Trials of grammars in another process, before the engine's own process compiles them.

Nothing in llguidance bounds the compilation of a grammar: a chain of rules overflows the stack, which ends the whole
process, and an expression of some kilobytes can take minutes and gigabytes. The process of this module therefore
compiles each new grammar first, in a fork with limits on time, memory and stack.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, BinaryIO

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jaxserve.structured.errors import grammar_fault
from jaxserve.structured.limits import LIMITS
from jaxserve.structured.source import grammar_source

CPU_SECONDS = 1  # grammars of tools take some milliseconds, and a list of 10,000 choices 0.2 seconds
MEMORY_BYTES = 256 * 1024 * 1024  # beside what the process takes without a grammar
STACK_BYTES = 1536 * 1024  # less than any thread of the engine's process has
MAX_MESSAGE = 2000  # characters; the messages of nested rules grow with the square of their depth
TOO_LARGE = "it takes too much time, memory or nesting to compile"


@dataclass(frozen=True)
class Tried:
    """The result of a trial: the source of a grammar for llguidance, and the memory in bytes that it takes compiled.

    `error`: why the grammar cannot be used, "" if it can.
    """

    source: str = ""
    size: int = 0
    error: str = ""


class GrammarTrials:
    """Tries grammars in a process that starts with the first of them, one call after another. Thread-safe."""

    def __init__(self, vocab_size: int, special: Mapping[str, int], eos_token_id: int):
        """`special`: the ids of the tokenizer's special tokens by text."""
        self._vocabulary = _Vocabulary(vocab_size, dict(special), eos_token_id)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def run(self, *grammars: tuple[str, str]) -> list[Tried]:
        """Compile grammars, each given by the kind and the text of a `StructuredOutput`.

        The limits are for all of them together. If they exceed one, the first grammar has the error.
        """
        with self._lock:
            answers = _ask(self._running(), grammars)
        if answers is None:
            return [Tried(error=TOO_LARGE), *(Tried() for _ in grammars[1:])]
        return [Tried(**answer) for answer in answers]

    def start(self) -> None:
        """Start the process, so that the first grammar need not wait for it."""
        with self._lock:
            self._running()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", __name__]
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
    """A vocabulary of bytes, with as many tokens as the real one, since compiling depends on nothing else of it."""

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
        fill = [bytes([token]) if token < 256 else b"\xff%d" % token for token in range(self.vocab_size)]
        return [texts.get(token, text) for token, text in enumerate(fill)]

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer the questions of `GrammarTrials`, the first of which is the vocabulary."""
    given = json.loads(questions.readline())
    vocabulary = _Vocabulary(given["vocab_size"], given["special"], given["eos_token_id"])
    tokenizer = LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.eos_token_id)
    answers.write(b"true\n")
    answers.flush()
    for question in questions:
        reading, writing = os.pipe()
        if not (child := os.fork()):
            _limit()
            with open(writing, "wb") as pipe:
                tried = [asdict(_tried(kind, text, vocabulary, tokenizer)) for kind, text in json.loads(question)]
                pipe.write(json.dumps(tried).encode())
            os._exit(0)
        os.close(writing)
        with open(reading, "rb") as pipe:
            answer = pipe.read()
        _, status = os.waitpid(child, 0)
        answers.write((b"null" if status else answer) + b"\n")
        answers.flush()


def _limit() -> None:
    """Limit this process: it ends where it exceeds a limit."""
    limits = {
        resource.RLIMIT_CPU: CPU_SECONDS,
        resource.RLIMIT_AS: _pages(0) + MEMORY_BYTES,
        resource.RLIMIT_STACK: STACK_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        _, hard = resource.getrlimit(limit)
        resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # where Rust says that memory is missing


def _tried(kind: str, text: str, vocabulary: _Vocabulary, tokenizer: LLTokenizer) -> Tried:
    before = _pages(1)
    try:
        source = grammar_source(kind, text, vocabulary.special)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=LIMITS)
    except (ValueError, RecursionError) as error:
        return Tried(error=grammar_fault(kind, text, str(error))[:MAX_MESSAGE])
    if matcher.is_error():
        return Tried(error=grammar_fault(kind, text, matcher.get_error())[:MAX_MESSAGE])
    return Tried(source, max(0, _pages(1) - before))


def _pages(column: int) -> int:
    """Return the bytes of this process by the column of /proc/self/statm: 0: virtual, 1: resident. 0 elsewhere."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[column]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
