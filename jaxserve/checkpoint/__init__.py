"""Checkpoints in Hugging Face layout: safetensors, read block by block. No pickle, no download."""

from jaxserve.checkpoint.loader import Checkpoint as Checkpoint, open_checkpoint as open_checkpoint
