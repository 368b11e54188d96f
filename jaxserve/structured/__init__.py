"""Grammars that answers must follow, compiled and matched by llguidance."""
