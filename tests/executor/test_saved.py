"""Programs compiled by an earlier start are loaded without tracing, and traced where they cannot be loaded."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.compilation.cache import BLOCK_TIER, CompileCounter, use_persistent_cache
from jaxserve.compilation.programs import Compiler, Program
from jaxserve.compilation.saved import FOLDER, SavedPrograms, saved_programs, signature
from jaxserve.core.config import EngineConfig
from jaxserve.parallel.placement import Placement
from jaxserve.planning.resolve import resolve
from jaxserve.sampling.ops import History
from tests.support.internals import index_file_of

ONE, TWO = (Placement(tuple(jax.devices()[:count])).sharding() for count in (1, 2))


class Traced:
    """A program that counts how often it is traced: (pool, x, numbers) -> (x, history, pool), the pool donated."""

    def __init__(self, sharding: jax.sharding.NamedSharding, name: str = "traced"):
        self.times = 0
        self.sharding = sharding
        self.program = Program(name, jax.jit(self._run, donate_argnums=0, out_shardings=sharding))

    def _run(self, pool: jax.Array, x: jax.Array, numbers: jax.Array, unused: jax.Array) -> tuple:
        self.times += 1
        return x + numbers.sum(), History(x > 0, numbers), (pool.at[0].set(x[1]),)

    def arguments(self) -> tuple:
        put = lambda array: jax.device_put(array, self.sharding)  # noqa: E731
        return put(jnp.zeros(4)), put(jnp.array([1.0, -2.0])), np.arange(3, dtype=np.int32), put(jnp.zeros(1))


def start(folder: Path, traced: Traced) -> tuple[Any, jax.Array]:
    """Return the results of a program that one start compiles or loads."""
    saved = SavedPrograms(folder / FOLDER / "model.json")
    compiler, arguments = Compiler(saved), traced.arguments()
    outlines = compiler.compile(traced.program, 0, *arguments)
    compiler.wait()
    compiler.save()
    results = traced.program.executables[0](*arguments)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), outlines) == jax.tree.map(lambda a: (a.shape, a.dtype), results)
    return results, arguments[0]


@pytest.fixture(autouse=True)
def cache() -> None:
    use_persistent_cache(None)


@pytest.mark.parametrize("sharding", [ONE, TWO], ids=["one device", "two devices"])
def test_saved_program_is_loaded_without_tracing(tmp_path: Path, sharding: jax.sharding.NamedSharding) -> None:
    first, second = Traced(sharding), Traced(sharding)
    expected, _ = start(tmp_path, first)
    counter = CompileCounter()
    found, pool = start(tmp_path, second)
    assert (first.times, second.times) == (1, 0)
    assert counter.counts[BLOCK_TIER] >= 1, "loading counts as compiling"
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), found, expected))
    assert pool.is_deleted(), "what was donated still is"
    assert jax.tree.leaves(found)[0].sharding == sharding
    counter.close()


@pytest.mark.parametrize("damage", ["key", "arguments", "results", "file"])
def test_damaged_saved_program_is_traced_again(tmp_path: Path, damage: str) -> None:
    expected, _ = start(tmp_path, Traced(ONE))
    (file,) = (tmp_path / FOLDER).iterdir()
    ((name, (key, kept, results)),) = json.loads(file.read_text()).items()
    damaged = {"key": ["no-such-key", kept, results], "arguments": [key, [7], results], "results": [key, kept, [3]]}
    file.write_text("{" if damage == "file" else json.dumps({name: damaged[damage]}))
    again = Traced(ONE)
    found, _ = start(tmp_path, again)
    assert again.times == 1
    assert found[0].tolist() == expected[0].tolist()


def test_programs_with_different_names_or_arguments_have_different_signatures() -> None:
    arguments = [jax.ShapeDtypeStruct((2,), np.int32, sharding=sharding) for sharding in (ONE, TWO)]
    wider = jax.ShapeDtypeStruct((3,), np.int32, sharding=ONE)
    programs = [("a", (), (arguments[0],)), ("b", (), (arguments[0],)), ("a", (1,), (arguments[0],))]
    programs += [("a", (), (arguments[1],)), ("a", (), (wider,)), ("a", (), ((arguments[0],),))]
    assert len({signature(*program) for program in programs}) == len(programs)


def test_changed_jax_setting_uses_a_different_index_file(tiny_model: Path) -> None:
    resolved = resolve(EngineConfig(model=tiny_model, load_format="dummy"))

    def file() -> Path:
        return index_file_of(saved_programs(resolved.padded_model, resolved.devices))

    before = file()
    assert file() == before
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert file() != before
    finally:
        jax.config.update("jax_default_matmul_precision", None)
