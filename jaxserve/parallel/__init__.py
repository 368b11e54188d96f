"""Placement of arrays: meshes, rules for logical axes, padding to even shards."""
