"""`jaxserve generate` and `jaxserve chat` as a user starts them, on a tiny random model."""

import io
import os
import subprocess
import sys

import pytest

from jaxserve.cli.main import converse
from jaxserve.core.request import CompletionOutput, RequestOutput
from tests.server.process import PATIENCE, ROOT

GREEDY = ("--temperature", "0", "--max-tokens", "6", "--load-format", "dummy")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """The user's, with a cache that the tests share."""
    return os.environ | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


def run(environment, *arguments: str, text: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jaxserve.cli.main", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, input=text, capture_output=True, encoding="utf-8", timeout=PATIENCE
    )


def test_generate_prints_the_continuation(environment, random_model):
    first = run(environment, "generate", "abc", "--model", str(random_model), *GREEDY)
    piped = run(environment, "generate", "-", "--model", str(random_model), *GREEDY, text="abc")
    assert first.returncode == 0, first.stderr
    assert len(first.stdout.encode()) > 1
    assert piped.stdout == first.stdout
    assert "Traceback" not in first.stderr


def test_chat_answers_each_line(environment, random_model):
    once = run(environment, "chat", "--model", str(random_model), *GREEDY, text="hello\n")
    twice = run(environment, "chat", "--model", str(random_model), *GREEDY, text="hello\n\nhello\n")
    assert once.returncode == twice.returncode == 0, twice.stderr
    assert twice.stdout.startswith(once.stdout)
    assert twice.stdout.removeprefix(once.stdout).strip()


def test_conversation_remembers_what_was_said(monkeypatch, capsys):
    seen = []

    def answer(messages):
        seen.append([(message["role"], message["content"]) for message in messages])
        for text in ("so", "!"):
            yield RequestOutput("id", None, (), (CompletionOutput(0, text, ()),), finished=text == "!")

    monkeypatch.setattr("sys.stdin", io.StringIO("one\n\ntwo\n"))
    converse(answer, system="Be brief.")
    assert seen[0] == [("system", "Be brief."), ("user", "one")]
    assert seen[1] == [*seen[0], ("assistant", "so!"), ("user", "two")]
    assert capsys.readouterr().out == "so!\nso!\n"


def test_ctrl_c_ends_an_answer_and_its_request(monkeypatch, capsys):
    ended = []

    def answer(messages):
        try:
            yield RequestOutput("id", None, (), (CompletionOutput(0, "so", ()),), finished=False)
            raise KeyboardInterrupt
        finally:
            ended.append(messages[-1]["content"])

    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    converse(answer, system=None)
    assert ended == ["one", "two"]
    assert capsys.readouterr().out == "so\nso\n"


def test_mistake_is_one_line(environment, random_model):
    wrong = run(environment, "generate", "abc", "--model", str(random_model), "--temperature", "-1", *GREEDY[4:])
    assert wrong.returncode == 1
    assert "temperature is -1" in wrong.stderr
    assert "Traceback" not in wrong.stderr
