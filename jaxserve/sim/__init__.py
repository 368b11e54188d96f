"""Discrete-event simulation of clusters: the engine's own scheduler, pages, controller and policies in virtual time."""
