"""An engine with so few pages that a policy soon has to act, and thresholds with which it does so within a second."""

OPTIONS = {
    "load_format": "dummy",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 4 + 32,
    "memory_gb": 4,
    "kv_pages": 20,
    "max_model_len": 256,
}
QUICK = {"release_quiet": 0.3, "release_interval": 0.1, "entry_hold": 0.0, "entry_interval": 0.1}
