"""Where arrays live: meshes, logical-axis rules, padding to even shards."""
