"""Pallas kernels for NVIDIA's Hopper GPUs.

Each kernel has the signature of a reference in plain JAX and computes the same result. The reference of
`paged_attention` is in `jaxserve.kernels.reference`; that of `quantized_matmul` is a product with `QArray.dequantize`.
A module's `supports` tells which shapes its kernel takes, and `jaxserve.kernels` chooses the implementation. Axis
letters are those of `jaxserve.kernels`.
"""
