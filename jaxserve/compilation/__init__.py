"""Compiling programs from shapes alone, several at once, and finding those of earlier starts again."""
