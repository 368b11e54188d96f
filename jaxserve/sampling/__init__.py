"""Sampling of tokens: the operations, and the state that they need on a device."""
