import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.compilation.cache import BLOCK_TIER, CompileCounter
from jaxserve.compilation.programs import Compiler, Program


def test_call_uses_the_executable_compiled_for_its_shape():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    pool, numbers = jax.device_put(jnp.zeros(100), sharding), np.arange(7, dtype=np.int32)
    state = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=sharding)
    add = Program(
        "add",
        jax.jit(lambda pool, x, n: (pool.at[0].set(x.sum() + n.sum()), x), donate_argnums=0, out_shardings=sharding),
    )
    counter, compiler = CompileCounter(), Compiler()
    outlines = compiler.compile(add, 7, pool, state, numbers)
    assert [outline.shape for outline in outlines] == [(100,), (3,)]
    compiler.compile(add, 5, pool, state, numbers[:5])
    assert compiler.compile(add, 7, pool, state, numbers) is outlines  # it is there already
    compiler.wait()
    assert counter.counts[BLOCK_TIER] == 2
    x = jax.device_put(np.ones(3, np.float32), sharding)
    pool, _ = add.at(7)(pool, x, numbers)
    pool, _ = add.at(5)(pool, x, numbers[:5])
    assert counter.counts[BLOCK_TIER] == 2
    assert pool[0] == 3 + 10
    assert add.at(6) is add.function
    counter.close()


def test_failed_compilation_raises_its_error():
    def fail(x):
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        Compiler().compile(Program("fail", jax.jit(fail)), 1, np.zeros(1))
