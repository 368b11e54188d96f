"""Parallel compilation of programs from shapes alone, and reuse of the programs of earlier starts."""
