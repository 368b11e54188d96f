"""A whole decoder layer of an 8B Llama, as the engine runs it on a Hopper GPU."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxserve.core.config import ModelConfig
from jaxserve.kernels import write_and_attend
from jaxserve.models import rope_cos_sin
from jaxserve.models.registry import abstract_block, block_state
from tests.pallas.test_attention import arguments

CONFIG = ModelConfig("LlamaForCausalLM", 128256, 4096, 32, 32, 8, 128, 14336, 8192, kernel_backend="pallas")


@pytest.mark.parametrize(("precision", "kernels"), [("bfloat16", 1), ("int8", 5), ("int4", 5), ("int3", 1)])
def test_quantised_layer_compiles_with_all_gpu_kernels(compile_for_h200, precision, kernels):
    """Attention is one kernel; qkv, o, gate_up and down are four more in 8 or 4 bits."""
    graphdef, variables = abstract_block(CONFIG, "layers.0", precision)
    state = block_state(variables, {name: variable.get_value() for name, variable in variables.items()})
    q, pool, meta = arguments(32, 0, 64, 8, 4, 128, 16, 64)

    def layer(state, x, positions, slots, meta, pool):
        def attend(qkv):
            nonlocal pool
            out, pool = write_and_attend(qkv, pool, slots, meta, scale=0.1, backend=CONFIG.kernel_backend)
            return out

        x = nnx.merge(graphdef, state)(x, *rope_cos_sin(CONFIG, positions), attend)
        return x, pool

    x, ids = jax.ShapeDtypeStruct((32, CONFIG.hidden_size), q.dtype), jax.ShapeDtypeStruct((32,), jnp.int32)
    compiled = compile_for_h200(layer, state, x, ids, ids, meta, pool, donate=(5,))
    assert compiled.as_text().count('custom_call_target="mosaic_gpu') == kernels
    stats = compiled.memory_analysis()
    assert stats.alias_size_in_bytes == pool[0].size * pool[0].dtype.itemsize
    if kernels == 5:  # no weight is there in 16 bits, not even the smallest
        assert stats.temp_size_in_bytes < 2 * CONFIG.hidden_size**2
