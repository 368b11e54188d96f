"""Checkpoints in Hugging Face layout: safetensors, read block by block. No pickle."""

from jaxserve.checkpoint.loader import Checkpoint as Checkpoint, open_checkpoint as open_checkpoint
