"""The types that all packages share, such as requests, configurations and errors.

Imports no other package of jaxserve, and no JAX.
"""
