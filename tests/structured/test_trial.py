"""Grammars whose compilation would end or fill the process are refused, because they are tried in another one first."""

import subprocess
import sys
from dataclasses import replace

import pytest

from jaxserve.core.errors import RequestError
from jaxserve.core.structured import StructuredOutput
from jaxserve.structured import compiler as compiler_module
from jaxserve.structured.compiler import LLGrammarCompiler
from jaxserve.structured.trial import TOO_LARGE, GrammarTrials

RULES = 5000


def chain(first: str, link: str, last: str) -> str:
    """Return a text of rules each of which needs the next one."""
    return "\n".join([first, *(link.format(i, i + 1) for i in range(RULES)), last.format(RULES)])


FATAL = {
    "chain of rules": StructuredOutput(grammar=chain("start: r0", 'r{}: "a" r{}', 'r{}: "z"')),
    "chain of terminals": StructuredOutput(grammar=chain("start: R0", 'R{}: "a" R{}', 'R{}: "z"')),
    "circle of rules": StructuredOutput(grammar=chain("start: r0", 'r{}: r{} "a" |', "r{}: r0")),
    "chain of references": StructuredOutput(
        json={"$ref": "#/$defs/0", "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}} for i in range(RULES)}},
        strict=True,
    ),
    "long expression": StructuredOutput(regex="a?" * 100_000),
}


@pytest.mark.parametrize("kind", FATAL)
def test_a_grammar_that_would_end_the_process_is_refused(compiler, kind) -> None:
    with pytest.raises(RequestError, match=TOO_LARGE):
        compiler.compile(FATAL[kind])
    assert compiler.compile(StructuredOutput(regex="a+")).start().error == ""


def test_a_schema_that_is_too_large_is_left_out_unless_it_is_strict(compiler, follows, caplog) -> None:
    asked = StructuredOutput(json={"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(5000)}})
    assert follows(asked, '{"p1": 5}')
    assert not follows(asked, "5")
    assert caplog.messages == ["json: answers are not held to #"]
    chain = FATAL["chain of references"]
    assert follows(replace(chain, strict=False), "5")


def test_a_grammar_of_many_rules_is_compiled(compiler) -> None:
    rules = "\n".join(f'r{i}: "a{i}" r{(i + 7) % 300}?' for i in range(300))
    compiler.compile(StructuredOutput(grammar="start: " + " | ".join(f"r{i}" for i in range(300)) + "\n" + rules))


def test_a_trial_tells_the_error_and_the_memory() -> None:
    trials = GrammarTrials(300, {"<end>": 299}, 299)
    invalid, special, small, large = trials.run(
        ("regex", "a)", False),
        ("grammar", 'start: "a" <[299]>', False),
        ("regex", "a?" * 300, False),
        ("regex", "a?" * 3000, False),
    )
    assert "a)" in invalid.error
    assert special.error == small.error == large.error == ""
    assert large.size > small.size


def test_an_error_names_the_part_at_fault(compiler) -> None:
    parts = [
        StructuredOutput(json={"type": kind}, strict=True, place=f"tools.{kind}") for kind in ("object", "nothing")
    ]
    grammar = 'start: %json {"type": "nothing"}'
    with pytest.raises(RequestError) as refused:
        compiler.compile(StructuredOutput(grammar=grammar, strict=True, place="tools", parts=parts))
    assert refused.value.field == "tools.nothing"


def test_a_trial_starts_another_process_if_the_first_has_ended() -> None:
    trials = GrammarTrials(300, {}, 299)
    trials.start()
    assert trials._process is not None
    trials._process.kill()
    trials._process.wait()
    assert not trials.run(("regex", "a", False))[0].error


def test_the_process_of_trials_ends_with_them() -> None:
    trials = GrammarTrials(300, {}, 299)
    trials.start()
    process = trials._process
    assert process is not None
    assert process.poll() is None
    del trials
    assert process.poll() is not None


def test_grammars_are_dropped_if_they_take_too_much_memory_together(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(compiler_module, "CACHED_BYTES", 1)
    compiler = LLGrammarCompiler(tokenizer, tokenizer.eos_token_ids)
    large = StructuredOutput(choice=[f"value {i}" for i in range(5000)])
    assert compiler.compile(large) is not compiler.compile(large)


@pytest.mark.parametrize(
    "vocabulary", [b"", b'{"vocab_size": 3, ', b'{"vocab_size": 3, "special": {}, "eos_token_id": 0}\n']
)
def test_process_ends_in_silence_if_the_engine_has_ended(vocabulary: bytes) -> None:
    """The engine may be gone before it has asked anything, in the middle of that, and before the first answer."""
    command = [sys.executable, "-m", "jaxserve.structured.trial", "0"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.close()
        process.stdin.write(vocabulary)
        process.stdin.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
