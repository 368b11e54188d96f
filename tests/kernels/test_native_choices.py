"""The choice among variants of the native product: what times tell, what is kept of them, and what serves then."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from math import log

import pytest
from hypothesis import given, settings, strategies as st

from jaxserve.kernels.native import choices
from jaxserve.kernels.native.checks import Check
from jaxserve.kernels.native.choices import Timing, choose
from tests.kernels.test_native_checks import compiled

ROWS = (1, 2, 4, 8, 16, 32)
# A library with two products, of which the second one's rule is not the fastest variant.
LIBRARY = """
#include <stdint.h>
#include <string.h>
#include <stdlib.h>
extern "C" {
int64_t jaxserve_timed_products(void) { return 3; }
void jaxserve_leave_out(const char*) {}
void jaxserve_time_product(int64_t i, double, char* to, size_t size) {
  const char* lines[] = {"16 wide 4 vnni vnni 1e-4 amx 5e-5", "8 wide 4 vnni vnni 1e-4 amx 5e-5", ""};
  END
  strncpy(to, lines[i], size);
}
}
"""


def timings(
    usual: str, bits: int = 8, rows: tuple[int, ...] = ROWS, **least: float | tuple[float, ...]
) -> list[Timing]:
    """Return times (us) of variants by rows; `usual` has a word for each number of rows, or one for all."""
    words = usual.split() if " " in usual else [usual] * len(rows)
    times = [
        {name: 1e-6 * (us if isinstance(us, float) else us[i]) for name, us in least.items()} for i in range(len(rows))
    ]
    return [
        Timing(index, bits, True, count, words[index], times[index], words[index]) for index, count in enumerate(rows)
    ]


def names(found: list[Timing], bits: int = 8) -> list[str]:
    return [timing.chosen for timing in found if timing.bits == bits]


def test_variant_that_is_hardly_faster_does_not_replace_the_usual_one():
    assert names(choose(timings("vnni", vnni=100.0, amx=92.0))) == ["vnni"] * 6


def test_variant_that_is_clearly_faster_replaces_the_usual_one():
    assert names(choose(timings("vnni", vnni=100.0, amx=85.0))) == ["amx"] * 6


def test_rows_from_which_on_another_variant_serves_are_measured():
    rule = "vnni vnni vnni avx2 avx2 avx2"
    vnni, avx2 = (10.0, 20.0, 40.0, 80.0, 160.0, 320.0), (50.0, 50.0, 60.0, 100.0, 100.0, 100.0)
    assert names(choose(timings(rule, vnni=vnni, avx2=avx2))) == ["vnni"] * 4 + ["avx2"] * 2


def test_variants_change_no_more_often_with_the_rows_than_by_the_rules():
    uneven = timings("amx", amx=100.0, vnni=(100.0, 80.0, 100.0, 80.0, 300.0, 80.0))
    assert names(choose(uneven)) == ["amx"] * 6


def test_variants_change_once_more_where_few_bits_would_take_longer_than_bfloat16():
    few = timings(
        "vnni vnni vnni avx2 avx2 avx2", vnni=(10.0, 10.0, 10.0, 80.0, 99.0, 99.0), avx2=50.0, amx=(90.0,) * 5 + (30.0,)
    )
    assert names(choose(few)) == ["vnni"] * 3 + ["avx2"] * 3
    full = timings("amx", 16, amx=40.0)
    assert names(choose(few + full)) == ["vnni"] * 3 + ["avx2"] * 2 + ["amx"]


def test_variants_that_give_the_same_bits_change_freely():
    few = timings("avx512bf16", avx512bf16=100.0, amxint8=(200.0, 80.0, 200.0, 80.0, 200.0, 80.0))
    assert names(choose(few)) == ["avx512bf16", "amxint8"] * 3


def test_weights_in_bfloat16_keep_the_rules():
    assert names(choose(timings("amx", 16, amx=100.0, vnni=10.0)), 16) == ["amx"] * 6


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_choice_is_never_worse_than_the_rules(data: st.DataObject) -> None:
    variants = ["amxint8", "amx", "vnni", "avx2"]
    rule = " ".join(data.draw(st.lists(st.sampled_from(variants), min_size=6, max_size=6), "rule"))
    times = st.lists(st.floats(1, 100), min_size=6, max_size=6).map(tuple)
    few = timings(rule, **{name: data.draw(times, name) for name in variants})
    full = timings("amx", 16, amx=data.draw(times, "bfloat16"))
    found = [timing for timing in choose(few + full) if timing.bits == 8]

    def product(of: list[str]) -> float:
        return sum(log(timing.least[name]) for timing, name in zip(few, of, strict=True))

    def slower(of: list[str]) -> int:
        limits = [1.05 * timing.least["amx"] for timing in full]
        return sum(t.least[name] > limit for t, name, limit in zip(few, of, limits, strict=True))

    rules, chosen = rule.split(), names(found)
    bits = {name: "integers" if name in choices.SAME_BITS else name for name in variants}
    changes = [sum(bits[a] != bits[b] for a, b in pairwise(of)) for of in (rules, chosen)]
    assert changes[1] <= changes[0] + 1
    assert product(chosen) <= product(rules) + 1e-9 or slower(chosen) < slower(rules)


# -- what is kept


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """A library in a folder of its own, and the list of the runs that time its products."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "package" / "cpu.so"
    path.parent.mkdir()
    path.write_bytes(b"library")
    done: list[list[int]] = []

    def run(library, left_out, indexes=()):
        done.append(list(indexes))
        return timings("vnni", rows=(1,), vnni=100.0, amx=85.0 - len(done))

    monkeypatch.setattr(choices, "_run", run)
    return path, done


def test_products_are_timed_once_and_departures_from_the_rules_again(runs):
    path, done = runs
    first = choices.chosen(path, (), "one")
    assert done == [[], [0], [0], [0]]
    assert names(first) == ["amx"]
    assert choices.chosen(path, (), "one") == first, "the same in every start"
    assert len(done) == 4
    choices.chosen(path, (), "another")
    assert len(done) == 8


def test_kernels_that_are_left_out_are_timed_without(runs):
    path, done = runs
    choices.chosen(path, (Check("product, amx, bfloat16 x int8", "computes wrong results"),), "one")
    choices.chosen(path, (), "one")
    assert len(done) == 8


def test_library_that_is_compiled_again_is_timed_again(runs):
    path, done = runs
    choices.chosen(path, (), "one")
    os.utime(path, ns=(1, 1))
    choices.chosen(path, (), "one")
    assert len(done) == 8


def test_choice_that_cannot_be_kept_is_not_made(runs, monkeypatch):
    path, done = runs
    monkeypatch.setattr(choices, "keep", lambda *_: None)
    assert choices.chosen(path, (), "one") == ()
    assert not done, "starts differ if each times anew"


def test_process_that_times_at_the_same_time_as_another_takes_its_choice(runs, monkeypatch):
    path, _ = runs
    timed = choices._timed

    def late(library, left_out):
        found = timed(library, left_out)
        choices._keep(library, "one", left_out, timings("vnni", rows=(1,), vnni=100.0))
        return found

    monkeypatch.setattr(choices, "_timed", late)
    assert names(choices.chosen(path, (), "one")) == ["vnni"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"processor": "one"}', "null"])
def test_damaged_choice_is_made_again(runs, text):
    path, done = runs
    choices.chosen(path, (), "one")
    (file,) = path.parent.glob("*.json")
    file.write_text(text)
    choices.chosen(path, (), "one")
    assert len(done) == 8
    assert json.loads(file.read_text())["processor"] == "one"


@pytest.mark.parametrize(("end", "count"), [("", 2), ("if (i == 1) abort();", 0), ("if (i == 1) exit(0);", 1)])
def test_times_come_from_a_process_of_its_own(tmp_path, native_kernels, end, count):
    fake = compiled(LIBRARY.replace("END", end), tmp_path)
    found = choices._run(fake, ["a kernel"])
    assert len(found) == count
    if count == 2:
        assert found[1] == Timing(1, 8, True, 4, "vnni", {"vnni": 1e-4, "amx": 5e-5}, "vnni")
        shown = choices.table(choices.choose(found)).splitlines()[2]
        assert shown.split() == ["int8", "wide", "4", "amx", "(measured)", "50.0", "0.50", "vnni", "100.0"]
        assert [timing.index for timing in choices._run(fake, [], [1])] == [1]


# -- what serves

SERVE = """
import jax.numpy as jnp, numpy as np
from jaxserve.kernels.native import library, matmul
from jaxserve.kernels.native.choices import Timing
from tests.kernels.test_native_matmul import operands

def variants_by(rows, inner, bits):
    x, w = operands(rows, 600, inner, bits, group=64 if inner < 768 else 128)
    got = np.asarray(matmul.matmul(x, w))
    return {name for name in library.variants(bits) if (np.asarray(matmul.matmul(x, w, variant=name)) == got).all()}

library.chosen = lambda path, checks: [Timing(0, 4, True, 8, "", {}, "portable"), Timing(0, 3, False, 1, "", {}, "amx")]
assert library.targets()
print(*("portable" in variants_by(*case) for case in [(8, 1024, 4), (5, 1024, 4), (4, 1024, 4), (9, 1024, 4)]))
print(*("portable" in variants_by(*case) for case in [(8, 576, 4), (8, 1024, 8), (8, 1024, 3), (1, 576, 3)]))
"""


def test_preferred_variant_serves_its_rows_its_weights_and_its_precision(native_kernels):
    done = subprocess.run([sys.executable, "-c", SERVE], capture_output=True, text=True, check=True).stdout
    assert done.split("\n")[:2] == ["True True False False", "False False False False"]
