"""Pallas kernels for NVIDIA's Hopper GPUs.

Each kernel has the signature of a reference in plain JAX and computes the same result. The reference of
`paged_attention` is in `jaxserve.kernels.reference`; that of `quantized_matmul` is a product with `QArray.dequantize`.
A module's `supports` returns whether its kernel takes given shapes. `jaxserve.kernels` chooses the implementation, and
defines the axis letters.
"""
