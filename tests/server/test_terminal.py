"""`jaxserve generate` and `jaxserve chat` as a user starts them, on a tiny random model."""

import io
import os
import shutil
import subprocess
import sys
from itertools import product

import pytest
from typer.testing import CliRunner

from jaxserve.cli.main import app, converse
from jaxserve.core.errors import PromptTooLong
from jaxserve.core.request import CompletionOutput, RequestOutput
from jaxserve.core.sampling import SamplingParams
from tests.server.process import PATIENCE, ROOT
from tests.support.thorough import some

GREEDY = ("--temperature", "0", "--max-tokens", "6", "--load-format", "dummy")


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the user's environment, with a compilation cache that the tests share."""
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


def test_chat_command_answers_each_line(environment, random_model):
    once = run(environment, "chat", "--model", str(random_model), *GREEDY, text="hello\n")
    twice = run(environment, "chat", "--model", str(random_model), *GREEDY, text="hello\n\nhello\n")
    assert once.returncode == twice.returncode == 0, twice.stderr
    assert twice.stdout.startswith(once.stdout)
    assert twice.stdout.removeprefix(once.stdout).strip()


def test_parameters_that_are_not_given_are_the_models(environment, random_model, tmp_path):
    model = tmp_path / "greedy"
    shutil.copytree(random_model, model)
    (model / "generation_config.json").write_text('{"temperature": 0.0}')
    asked = run(environment, "generate", "abc", "--model", str(model), "--seed", "1", *GREEDY[2:])
    greedy = run(environment, "generate", "abc", "--model", str(model), *GREEDY)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout == greedy.stdout


class TalkativeLLM:
    """An LLM in which each character is a token and every answer has the maximum length."""

    def __init__(self, max_model_len: int):
        self.max_model_len = max_model_len
        self.tokenizer = self
        self.prompts: list[str] = []
        self.room: list[int] = []

    def conversation_text(self, messages):
        return "".join(f"{message['role'][0]}:{message['content']};" for message in messages)

    def encode(self, text, add_special_tokens=True):
        return list(text)

    def stream(self, ids, params):
        if len(ids) >= self.max_model_len:
            raise PromptTooLong(f"the prompt has {len(ids)} tokens")
        assert len(ids) + params.max_tokens <= self.max_model_len
        self.prompts.append("".join(ids))
        self.room.append(params.max_tokens)
        for index in range(params.max_tokens):
            yield RequestOutput("id", None, (), (CompletionOutput(0, "!", ()),), finished=index == params.max_tokens)


def conversed(monkeypatch, capsys, *lines: str, max_model_len: int, max_tokens: int, system: str | None = None):
    """Hold a conversation of `lines`, and return the model and the captured output."""
    llm = TalkativeLLM(max_model_len)
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    converse(llm, SamplingParams(max_tokens=max_tokens), system)
    return llm, capsys.readouterr()


def test_conversation_remembers_what_was_said(monkeypatch, capsys):
    llm, said = conversed(monkeypatch, capsys, "one", "", "two", max_model_len=100, max_tokens=3, system="Be brief.")
    assert llm.prompts == ["s:Be brief.;u:one;", "s:Be brief.;u:one;a:!!!;u:two;"]
    assert said.out == "!!!\n!!!\n"
    assert said.err == ""


def test_conversation_leaves_out_its_oldest_turns_when_the_context_is_full(monkeypatch, capsys):
    llm, said = conversed(monkeypatch, capsys, "one", "two", "six", "ten", max_model_len=40, max_tokens=10, system="Hi")
    assert llm.prompts == [
        "s:Hi;u:one;",
        "s:Hi;u:one;a:!!!!!!!!!!;u:two;",
        "s:Hi;u:two;a:!!!!!!!!!!;u:six;",
        "s:Hi;u:six;a:!!!!!!!!!!;u:ten;",
    ]
    assert said.err.count("1 of the oldest turns were left out") == 2


def test_answer_in_a_small_context_fills_the_context(monkeypatch, capsys):
    llm, said = conversed(monkeypatch, capsys, "one", max_model_len=20, max_tokens=512)
    assert llm.room == [20 - len("u:one;")]
    assert said.err == ""


def test_conversation_goes_on_after_a_line_that_is_too_long(monkeypatch, capsys):
    llm, said = conversed(monkeypatch, capsys, "one", "x" * 50, "two", max_model_len=40, max_tokens=4)
    assert llm.prompts == ["u:one;", "u:one;a:!!!!;u:two;"]
    assert said.err == "jaxserve: the prompt has 53 tokens\n"


def test_chat_in_a_context_smaller_than_an_answer_goes_on(environment, random_model):
    options = ("--load-format", "dummy", "--max-model-len", "64", "--seed", "1")
    done = run(environment, "chat", "--model", str(random_model), *options, text="hello\n" * 4 + "x" * 99 + "\nhello\n")
    assert done.returncode == 0, done.stderr
    assert "oldest turns were left out" in done.stderr
    assert done.stderr.count("jaxserve: This model's maximum context length is 64 tokens") == 1


def test_generate_answers_within_the_remaining_context(environment, random_model):
    options = ("--load-format", "dummy", "--max-model-len", "16", "--max-tokens", "500")
    done = run(environment, "generate", "abc", "--model", str(random_model), *options)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("encoding", some(["ascii", "latin-1"], 1))
def test_characters_that_the_terminal_lacks_are_replaced(environment, random_model, encoding):
    narrow = environment | {"PYTHONIOENCODING": encoding}
    options = ("--model", str(random_model), "--load-format", "dummy", "--temperature", "0", "--max-tokens", "6")
    done = run(narrow, "generate", "é ∑", *options)
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout  # U+FFFD: the bytes of a random model are not UTF-8
    assert run(narrow, "serve", "--help").returncode == 0


def test_model_without_tokenizer_is_reported_in_one_line(environment, random_model, tmp_path):
    shutil.copy(random_model / "config.json", tmp_path)
    done = run(environment, "generate", "abc", "--model", str(tmp_path), "--load-format", "dummy")
    assert done.returncode == 1
    assert "jaxserve: the model has no tokenizer (its folder has no tokenizer.json or tokenizer.model" in done.stderr
    assert "Traceback" not in done.stderr


MISSING = [{"JAX_PLATFORMS": "cuda"}, {"JAX_PLATFORMS": "foo"}, {"JAX_PLATFORM_NAME": "gpu"}]
COMMANDS = [("serve", "--port", "0"), ("quantize", "--method", "rtn")]


@pytest.mark.parametrize(("asked", "command"), some(product(MISSING, COMMANDS), 2))
def test_missing_platform_is_reported_in_one_line(environment, tmp_path, asked, command):
    out = ("--out", str(tmp_path)) if command[0] == "quantize" else ()
    chosen = {name: value for name, value in environment.items() if not name.startswith("JAX_PLATFORM")} | asked
    done = run(chosen, *command, *out)
    ((name, value),) = asked.items()
    assert done.returncode == 1
    assert "jaxserve: JAX cannot start: " in done.stderr
    assert f"({name}={value})" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [(KeyboardInterrupt(), 130, "interrupted"), (OSError(2, "No such file", "here.txt"), 1, "here.txt: No such file")],
    ids=["ctrl-c", "file"],
)
def test_ctrl_c_and_file_errors_are_reported_in_one_line(monkeypatch, error, status, message):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr("jaxserve.core.bundled.bundled_model_path", fail)
    done = CliRunner().invoke(app, ["quantize", "--method", "rtn"])
    assert (done.exit_code, done.stderr) == (status, f"jaxserve: {message}\n")


class InterruptedLLM(TalkativeLLM):
    """An LLM whose user presses Ctrl-C after the first token of every answer."""

    ended = 0

    def stream(self, ids, params):
        try:
            yield RequestOutput("id", None, (), (CompletionOutput(0, "so", ()),), finished=False)
            raise KeyboardInterrupt
        finally:
            self.ended += 1


def test_conversation_without_standard_input_ends(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    converse(TalkativeLLM(100), SamplingParams(max_tokens=4), None)


def test_ctrl_c_ends_an_answer_and_its_request(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    llm = InterruptedLLM(100)
    converse(llm, SamplingParams(max_tokens=4), None)
    assert llm.ended == 2
    assert capsys.readouterr().out == "so\nso\n"


def test_command_line_mistake_is_reported_in_one_line(environment, random_model):
    wrong = run(environment, "generate", "abc", "--model", str(random_model), "--temperature", "-1", *GREEDY[4:])
    assert wrong.returncode == 1
    assert "temperature is -1" in wrong.stderr
    assert "Traceback" not in wrong.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("srv", "no such command 'srv'. Did you mean 'serve'?; see jaxserve --help"),
        ("--foo", "no such option: --foo; see jaxserve --help"),
        ("bench foo", "no such command 'foo'; see jaxserve bench --help"),
        ("generate", "missing argument 'prompt'; see jaxserve generate --help"),
        ("serve --port 70000", "--port is '70000': it must be at most 65535; see jaxserve serve --help"),
        ("serve --port x", "--port is 'x': it must be an integer; see jaxserve serve --help"),
        ("plan show --decisions -1", "--decisions is '-1': it must be at least 0; see jaxserve plan show --help"),
        (
            "quantize --method x",
            "--method: 'x' is not one of 'awq', 'gptq', 'rtn'; see jaxserve quantize --help",
        ),
    ],
)
def test_wrong_use_is_reported_in_one_line_with_what_is_allowed(line, message):
    done = CliRunner().invoke(app, line.split(), prog_name="jaxserve")
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", f"jaxserve: {message}\n")


@pytest.mark.parametrize("line", ["", "bench", "plan"])
def test_group_without_a_command_prints_its_help(line):
    done = CliRunner().invoke(app, line.split(), prog_name="jaxserve")
    assert "Commands" in done.output
    assert "jaxserve: " not in done.output


def test_profile_reports_a_missing_text_in_one_line(tmp_path):
    done = CliRunner().invoke(
        app, ["profile", "--calib", str(tmp_path / "none.txt"), "--out", str(tmp_path / "a.json")]
    )
    message = f"jaxserve: cannot read {tmp_path / 'none.txt'}: No such file or directory\n"
    assert (done.exit_code, done.stderr) == (1, message)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has /dev/full")
def test_full_disk_is_reported_in_one_line(environment):
    command = [sys.executable, "-c", FULL]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "jaxserve: standard output: No space left on device\n")


# Two commands besides the real ones: one writes much text, one gets a Ctrl-C in a callback of the garbage collector.
FULL = """
import sys
from jaxserve.cli import main
main.app.command(name="write")(lambda: print("a" * 100_000))
sys.argv = ["jaxserve", "write"]
main.main()
"""
LOST = """
import gc, sys, time
from jaxserve.cli import main

def interrupted(phase, info):
    if phase == "stop":
        gc.callbacks.remove(interrupted)
        raise KeyboardInterrupt

def wait():
    gc.callbacks.append(interrupted)
    gc.collect()
    time.sleep(60)

main.app.command()(wait)
sys.argv = ["jaxserve", "wait"]
main.main()
"""


def test_ctrl_c_during_garbage_collection_is_not_lost(environment):
    command = [sys.executable, "-c", LOST]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (130, "jaxserve: interrupted\n")
