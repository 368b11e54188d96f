"""The programs in docs/library.md, and the first one in README.md, run as they stand there."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

import jaxserve
from jaxserve import LLM, AsyncLLM

ROOT = Path(__file__).parents[2]


def programs(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


PROGRAMS = programs("docs/library.md")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(warmup=False, max_num_seqs=4) as llm:
        yield llm


@pytest.mark.parametrize("program", [programs("README.md")[0], *PROGRAMS])
def test_program_runs(llm: LLM, program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(jaxserve, "LLM", lambda *_, **__: nullcontext(llm))  # the model is loaded once for all programs
    monkeypatch.setattr(jaxserve, "AsyncLLM", partial(AsyncLLM, warmup=False, max_num_seqs=4))
    exec(compile(program, "docs/library.md", "exec"), {"__name__": "__main__"})
    assert "print(" not in program or capsys.readouterr().out.strip()


def test_page_has_programs_for_each_class() -> None:
    for name in ("LLM", "AsyncLLM", "StructuredOutput", "AnswerFormat"):
        assert any(f"{name}(" in program for program in PROGRAMS)
