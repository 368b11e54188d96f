"""jaxserve beside other engines: same checkpoints, same shapes, same threads, one run (`python -m bench.peers`).

Only numpy and the standard library are imported outside the functions that need more, because each engine runs in an
interpreter of its own, which may have neither JAX nor torch.
"""
