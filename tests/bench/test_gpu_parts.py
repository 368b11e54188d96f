"""Parts of bench.gpu that check what they measure: tokens, products, and the programs that steps need."""

from pathlib import Path

import jax
import pytest

from bench.gpu_parts import products, samplers, steps
from bench.gpu_parts.engine import Jaxserve, finish
from bench.gpu_parts.sizes import REAL, TINY
from bench.gpu_parts.worker import ensure_model, shortened
from jaxserve.kernels import matmul


def test_all_samplers_draw_the_tokens_of_bisection() -> None:
    rows = list(samplers.rows(TINY))
    kinds = [row["case"].partition(",")[0] for row in rows]
    assert kinds == ["greedy", "random", "random", "masked", "masked", "masked", "bisected"]
    assert len({row["case"] for row in rows}) == len(rows)
    assert all(row["different"] == 0 and row["seconds"] > 0 for row in rows)


def test_token_that_the_next_step_would_not_read_counts_as_different() -> None:
    newest = jax.numpy.array([1, 2, 0])
    assert samplers.different(lambda: (newest[:2], newest), lambda: (newest[:2],)) == 0
    assert samplers.different(lambda: (newest[:2], newest + 1), lambda: (newest[:2],)) == 2
    assert samplers.different(lambda: (newest[:2], newest), lambda: (newest[1:],)) == 2


@pytest.mark.parametrize("precision", ["int4", "bf16"])
def test_products_are_compared_with_float32(precision: str) -> None:
    rows = list(products.rows(precision, TINY))
    form = "" if precision == "bf16" else f" in {precision}"
    weights = (("gate_up", 8), ("qkv", 4), ("o", 4), ("down", 4))
    assert [row["case"] for row in rows] == [f"8b {name}{form}, {n} rows" for name, n in weights]
    assert all(0 < row["relative_error"] < 0.01 and row["seconds"] > 0 for row in rows)


def test_wrong_product_has_a_large_error() -> None:
    (case, *_) = products.cases(4, TINY.models[-1], TINY.multiplying)
    programs = products.compiled_for(case, TINY)
    x, w = programs.inputs(jax.random.key(1))
    assert products.relative_error(matmul(x, w), x, w, programs) < 0.01
    assert products.relative_error(matmul(x[::-1], w), x, w, programs) > 0.5


def test_steps_run_the_shapes_that_were_found_without_executing_any(tmp_path: Path) -> None:
    stepping = TINY.stepping
    model = shortened(TINY.models[-1], stepping.num_layers)
    engine = Jaxserve(
        ensure_model(model, tmp_path), model, TINY, seqs=stepping.seqs, step_tokens=stepping.most_chunk,
        max_len=stepping.max_len, kv_pages=stepping.kv_pages,
    )  # fmt: skip
    found = [steps.shapes(engine, *case, stepping) for case in stepping.cases[0][1]]
    for case, (shape, passed) in zip(stepping.cases[0][1], found, strict=True):
        run = set()

        def note(loop, work, run=run) -> None:
            run.add(engine.executor.buckets.of(work))
            finish(loop, work)

        with steps.reached(engine, *case, stepping, note) as work:
            assert engine.executor.buckets.of(work) == shape
            assert (len(work.decodes), work.num_tokens - len(work.decodes)) == case
            steps.ask(engine, 1.0, 0.9)
        assert run == passed


@pytest.mark.parametrize("sizes", [REAL, TINY], ids=["real", "tiny"])
def test_steps_have_room_for_their_chunks_and_sequences(sizes) -> None:
    stepping = sizes.stepping
    assert max(chunk for _, cases in stepping.cases for _, chunk in cases) <= stepping.most_chunk
    for _, cases in stepping.cases:
        assert all(decodes + -(-chunk // stepping.prompt) <= stepping.seqs for decodes, chunk in cases)
