import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.executor.ahead import compile_all
from jaxserve.executor.compilation import BLOCK_TIER, CompileCounter


def test_calls_find_what_was_compiled_for_them():
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    pool, numbers = jax.device_put(jnp.zeros(100), sharding), np.arange(7, dtype=np.int32)
    state = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=sharding)
    add = jax.jit(lambda pool, x, n: (pool.at[0].set(x.sum() + n.sum()), x), donate_argnums=0, out_shardings=sharding)
    counter = CompileCounter()
    compile_all([(add, (pool, state, numbers)), (add, (pool, state, numbers[:5]))])
    assert counter.counts[BLOCK_TIER] == 2
    pool, x = add(pool, jax.device_put(np.ones(3, np.float32), sharding), numbers)
    add(pool, x, numbers[:5])
    assert counter.counts[BLOCK_TIER] == 2


def test_what_cannot_be_compiled_is_said():
    def fail(x):
        raise ValueError("no such thing")

    with pytest.raises(ValueError, match="no such thing"):
        compile_all([(jax.jit(fail), (np.zeros(1),))])
