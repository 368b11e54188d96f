"""jaxserve compared with other engines: same checkpoints, shapes and threads, in one run (`python -m bench.peers`).

Outside functions only numpy and the standard library are imported, because each engine runs in its own interpreter,
which may lack JAX or torch.
"""
