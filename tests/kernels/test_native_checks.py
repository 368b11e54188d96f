"""The checks of native kernels on this processor: what they find, what is kept of them, and what serves afterwards."""

import json
import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from math import inf, isnan
from pathlib import Path

import pytest

from jaxserve.kernels.native import __main__ as command, build, checks, choices, library

HERE = Path(__file__).parent / "native"
# A library whose kernels are right, or broken in every way in which kernels may be.
LIBRARY = """
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
extern "C" {
static const char* const names[] = {
    "product, fast, a", "product, wrong, b",     "draw, nothing, c", "rows, crash, d",
    "rows, illegal, e", "attention, endless, f", "pool, exit, g",    "rows, portable, all"};
int64_t jaxserve_checks(void) { return 8; }
void jaxserve_check_name(int64_t i, char* to, size_t size) { strncpy(to, names[i], size); }
double jaxserve_check(int64_t i) {
  switch (i) {
    case 1: return 1.5;
    case 2: return NAN;
    case 3: *(volatile int*)8 = 0;
    case 4: __builtin_trap();
    case 5: for (volatile int x = 0;; ++x) {}
    case 6: exit(3);
  }
  return 0.25;
}
}
"""
# A library whose first check ends in a way that a kernel may not be blamed for, and whose second one is right.
UNLUCKY = """
#include <signal.h>
#include <stdint.h>
#include <string.h>
extern "C" {
int64_t jaxserve_checks(void) { return 2; }
void jaxserve_check_name(int64_t i, char* to, size_t size) {
  strncpy(to, i ? "draw, right, b" : "draw, unlucky, a", size);
}
double jaxserve_check(int64_t i) { return i ? 0 : UNLUCK; }
}
"""
# A library whose first kernel writes to memory of the second one.
INTRUSIVE = """
#include <math.h>
#include <stdint.h>
#include <string.h>
static const int* number = new int(0);
extern "C" {
int64_t jaxserve_checks(void) { return 2; }
void jaxserve_check_name(int64_t i, char* to, size_t size) {
  strncpy(to, i ? "draw, right, b" : "draw, intrusive, a", size);
}
double jaxserve_check(int64_t i) {
  if (i) return *number;
  number = nullptr;
  return INFINITY;
}
}
"""
BLOCKED = """
#include <stdint.h>
#include <string.h>
#include <unistd.h>
extern "C" {
int64_t jaxserve_checks(void) { return 2; }
void jaxserve_check_name(int64_t i, char* to, size_t size) {
  strncpy(to, i ? "draw, right, b" : "draw, blocked, a", size);
}
double jaxserve_check(int64_t i) { return i ? 0 : sleep(600); }
}
"""


def compiled(source: str, folder: Path) -> Path:
    """Return a library compiled from a source."""
    command = ["c++", "-x", "c++", "-w", "-shared", "-fPIC", "-", "-o", str(folder / "fake.so")]
    subprocess.run(command, input=source, text=True, check=True)
    return folder / "fake.so"


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Checks that may compute for a second."""
    monkeypatch.setattr(checks, "PROCESSOR_TIME", 1.0)


@pytest.fixture(scope="module")
def broken(tmp_path_factory, native_kernels):
    return compiled(LIBRARY, tmp_path_factory.mktemp("broken"))


def test_kernel_that_fails_its_check_ends_no_other(broken):
    found = {check.name: check for check in checks.run_checks(broken)}
    assert {name: check.result for name, check in found.items()} == {
        "product, fast, a": "right",
        "product, wrong, b": "computes wrong results",
        "draw, nothing, c": "computes wrong results",
        "rows, crash, d": "ends the process by SIGSEGV",
        "rows, illegal, e": "ends the process by SIGILL",
        "attention, endless, f": "does not return within 1 s",
        "pool, exit, g": "ends the process with status 3",
        "rows, portable, all": "right",
    }
    assert found["product, wrong, b"].error == 1.5
    assert isnan(found["draw, nothing, c"].error)


def test_left_out_kernels_are_named_in_a_line_each_at_every_start(broken, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)
    first = checks.checked(broken, "a processor")
    lines = [record.message for record in caplog.records]
    assert len(lines) == 6
    assert lines[2] == "native CPU kernel left out (rows, crash, d): it ends the process by SIGSEGV on this processor"
    monkeypatch.setattr(checks, "run_checks", lambda path: pytest.fail("the outcome is known"))
    caplog.clear()
    assert [check.name for check in checks.checked(broken, "a processor")] == [check.name for check in first]
    assert [record.message for record in caplog.records] == lines


@pytest.mark.parametrize("unluck", ["-1", "raise(SIGTERM)", "raise(SIGXCPU)", "raise(SIGKILL)"])
def test_check_that_limits_or_users_end_is_not_remembered(tmp_path, native_kernels, unluck):
    unlucky = compiled(UNLUCKY.replace("UNLUCK", unluck), tmp_path)
    first, second = checks.checked(unlucky, "one")
    assert not first.right
    assert not first.final
    assert second.right
    assert not list(tmp_path.glob("*.json"))


def test_right_kernel_is_not_blamed_for_one_that_writes_to_its_memory(tmp_path, native_kernels):
    first, second = checks.run_checks(compiled(INTRUSIVE, tmp_path))
    assert first.result == "computes wrong results"
    assert second.right


RIGHT = (checks.Check("draw, portable, float32", "right", 0.5),)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A library in a folder of its own, and the list of the runs of its checks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "package" / "cpu.so"
    path.parent.mkdir()
    path.write_bytes(b"library")
    done: list[Path] = []
    monkeypatch.setattr(checks, "run_checks", lambda library: (done.append(library), RIGHT)[1])
    monkeypatch.setattr(checks, "kernels", lambda library: [check.name for check in RIGHT])
    return path, done


def test_every_processor_is_checked_once(runs):
    path, done = runs
    for identity in ("one", "one", "another", "another", "one"):
        assert checks.checked(path, identity) == RIGHT
    assert len(done) == 2


def test_library_that_is_compiled_again_is_checked_again(runs):
    path, done = runs
    checks.checked(path, "one")
    os.utime(path, ns=(1, 1))
    checks.checked(path, "one")
    path.write_bytes(b"another library")
    checks.checked(path, "one")
    assert len(done) == 3


def test_outcome_counts_only_for_all_kernels_that_can_run_here(runs, monkeypatch):
    path, done = runs
    checks.checked(path, "one")
    monkeypatch.setattr(checks, "kernels", lambda library: ["draw, avx2, float32", "draw, portable, float32"])
    checks.checked(path, "one")
    assert len(done) == 2, "a kernel that the file lacks would serve without a check"


def test_names_of_kernels_are_those_of_their_checks(broken):
    assert checks.kernels(broken) == [check.name for check in checks.run_checks(broken)]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_outcome_is_kept_elsewhere_if_something_else_has_its_place(runs, make):
    path, done = runs
    checks.checked(path, "one")
    (file,) = path.parent.glob("*.json")
    file.unlink()
    make(file)
    for _ in range(2):
        assert checks.checked(path, "one") == RIGHT
    assert len(done) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", '{"processor": "one"}', "null", "[" * 100_000])
def test_damaged_outcome_is_replaced(runs, text):
    path, done = runs
    checks.checked(path, "one")
    (file,) = path.parent.glob("*.json")
    file.write_text(text)
    assert checks.checked(path, "one") == RIGHT
    assert checks.checked(path, "one") == RIGHT
    assert len(done) == 2
    assert json.loads(file.read_text())["processor"] == "one"


def test_outcome_goes_to_the_cache_where_the_package_cannot_be_written(runs, tmp_path, monkeypatch):
    path, done = runs
    write = Path.write_text

    def refused(file, *args, **kwargs):
        if file.parent == path.parent:
            raise PermissionError(13, "read-only")
        return write(file, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", refused)
    checks.checked(path, "one")
    checks.checked(path, "one")
    assert len(done) == 1
    assert list((tmp_path / "cache" / "jaxserve" / "native").glob("*.json"))
    monkeypatch.setattr(Path, "write_text", lambda *args, **kwargs: refused(path))
    assert checks.checked(path, "another") == RIGHT, "an outcome that cannot be kept serves this process"


def test_kernel_that_another_process_may_have_held_up_is_checked_again(tmp_path, monkeypatch, native_kernels):
    blocked = compiled(BLOCKED, tmp_path)
    monkeypatch.setattr(checks, "PATIENCE", 2.0)
    first, second = checks.checked(blocked, "one")
    assert (first.result, first.final) == ("did not return within 2 s", False)
    assert second.right
    assert not list(tmp_path.glob("*.json"))


def test_library_whose_checks_cannot_start_is_not_used(tmp_path, monkeypatch, caplog):
    path = tmp_path / "cpu.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(library, "_library", lambda: path)
    library.targets.cache_clear()
    try:
        assert library.targets() == frozenset()
    finally:
        library.targets.cache_clear()
    assert "cannot be checked" in caplog.text


def test_every_kernel_of_this_machine_is_right(native_kernels, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["native", "--check"])
    monkeypatch.setattr(choices, "keep", lambda *_: None)  # a choice is not made again
    assert command.main() == 0
    checked, timed = capsys.readouterr().out.split("\n\n")
    assert timed.startswith("weight ")
    lines = checked.splitlines()[1:]
    assert lines[0].split() == ["kernel", "variant", "precision", "result", "error", "/", "allowed"]
    assert {line.split()[0] for line in lines[1:]} >= {"product", "attention", "rows", "draw", "logprobs", "pool"}
    assert all("right" in line for line in lines[1:])


def test_check_finds_a_single_wrong_number(native_kernels, tmp_path):
    portable = [
        *build.PORTABLE,
        "check_attention.cc",
        "check_matmul.cc",
        "check_rows.cc",
        str(HERE / "broken_kernels.cc"),
    ]

    def compile_unit(index):
        command = ["c++", *build.FLAGS, "-O1", "-I", build.HERE, "-c", build.HERE / portable[index], "-o"]
        subprocess.run([*command, tmp_path / f"{index}.o"], check=True)
        return tmp_path / f"{index}.o"

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_unit, range(len(portable))))
    subprocess.run(["c++", *objects, "-pthread", "-o", tmp_path / "program"], check=True)
    said = subprocess.run([tmp_path / "program"], capture_output=True, text=True, check=True).stdout
    errors = {name: (float(right), float(wrong)) for name, right, wrong in map(str.split, said.splitlines())}
    assert len(errors) == 8
    assert errors.pop("writes-beyond")[1] == inf
    for name, (right, wrong) in errors.items():
        assert right <= 1 < wrong, name


def test_check_on_request_replaces_the_outcome_that_is_kept(broken, native_kernels, capsys, monkeypatch):
    monkeypatch.setattr(command, "build_or_report", lambda folder: broken)
    monkeypatch.setattr(sys, "argv", ["native", "--check"])
    assert command.main() == 1
    monkeypatch.setattr(checks, "run_checks", lambda library: pytest.fail("the outcome is known"))
    assert len(checks.checked(broken)) == 8


def test_check_on_request_of_a_damaged_library_says_so_in_one_line(tmp_path, capsys, monkeypatch):
    path = tmp_path / "cpu.so"
    path.write_bytes(b"no library")
    monkeypatch.setattr(command, "build_or_report", lambda folder: path)
    monkeypatch.setattr(sys, "argv", ["native", "--check"])
    assert command.main() == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(path) in said


SERVE = """
import jax, jax.numpy as jnp, numpy as np, sys
from jaxserve.kernels import matmul, paged_attention
from jaxserve.kernels.native import attention, library, sampling
from tests.kernels.problems import Shape, dense_answer, make_problem
from jaxserve.kernels.native.checks import Check, run_checks
from jaxserve.quantization import QArray
from jaxserve.quantization.rounding import quantize

out = [check for check in run_checks(library._library()) if eval(sys.argv[1])(*check.name.split(", ", 2))]
library.checked = lambda path: tuple(Check(check.name, "is left out") for check in out)
library.chosen = lambda path, checks: ()
rng = np.random.default_rng(0)
errors = []
for rows in (1, 3, 7, 40):
    x = jnp.asarray(rng.standard_normal((rows, 256)), jnp.bfloat16)
    w = jax.tree.map(jnp.asarray, quantize(rng.standard_normal((40, 256)).astype(np.float32), 4))
    exact = np.asarray(x, np.float64) @ np.asarray(w.dequantize(), np.float64).T
    errors.append(np.abs(np.asarray(jax.jit(matmul)(x, w)) - exact).max() / np.abs(exact).max())
problem = make_problem(Shape(B=2, N=1), 0)
attended = paged_attention(problem.q, problem.pool, problem.meta, scale=0.1)
errors.append(np.abs(np.asarray(attended) - dense_answer(problem, 0.1, None)).max())
calls = set(library.targets())
if not attention.supports(problem.q.dtype, problem.q.shape[-1], problem.pool):
    calls.add("xla-attention")
if not sampling.supported():
    calls.add("xla-sampling")
print(len(out), max(errors) < 0.02, *sorted(library.variants(4)), *sorted(calls))
"""


def served_without(left_out: str) -> tuple[bool, set[str]]:
    """Return whether products and attention are right, and what serves, where some kernels are left out.

    These are names of variants of the product, of native calls, and of parts that XLA computes.
    """
    done = subprocess.run([sys.executable, "-c", SERVE, left_out], capture_output=True, text=True, check=True)
    count, right, *names = done.stdout.split()
    assert int(count) > 0
    return right == "True", set(names)


def test_next_best_variant_serves_in_place_of_one_that_is_left_out(native_kernels):
    there = library.variants(4)
    right, names = served_without(f"lambda kernel, variant, precision: variant == {there[0]!r}")
    assert right
    assert names == {*there[1:], *library.CALLS}


def test_xla_serves_in_place_of_kernels_of_which_no_variant_is_left(native_kernels):
    right, names = served_without("lambda kernel, variant, precision: kernel in ('product', 'logprobs')")
    assert right
    assert names == {*library.CALLS, "xla-sampling"} - {library.MATMUL, library.LOGPROBS}


def test_any_variant_that_is_left_serves_all_numbers_of_rows(native_kernels):
    others = "lambda kernel, variant, precision: kernel == 'product' and 'bfloat16 x' in precision and variant != "
    for variant in {"amx", "avx2few"}.intersection(library.variants(4)):  # the fastest for some numbers of rows only
        right, names = served_without(f"{others}{variant!r}")
        assert right, variant
        assert names == {variant, *library.CALLS}


def test_xla_attends_if_no_variant_of_attention_is_left(native_kernels):
    right, names = served_without("lambda kernel, variant, precision: kernel == 'attention'")
    assert right
    assert names == {*library.variants(4), *library.CALLS, "xla-attention"} - {
        library.ATTENTION,
        library.WRITE_AND_ATTEND,
    }


def test_xla_serves_if_no_kernel_is_left(native_kernels):
    assert served_without("lambda kernel, variant, precision: True") == (True, {"xla-attention", "xla-sampling"})
