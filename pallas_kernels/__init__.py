"""GPU kernels for NVIDIA's Hopper generation, in Pallas.

Each has the signature and the meaning of a reference in plain JAX: `paged_attention` that of
`jaxserve.kernels.reference`, `quantized_matmul` that of a product with `QArray.dequantize`. `supports` of each module
says for which shapes; `jaxserve.kernels` chooses. Axis letters are those of `jaxserve.kernels`.
"""
