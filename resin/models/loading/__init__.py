"""Readers of weight files: Hugging Face directories with safetensors, and GGUF files."""

from resin.models.loading.checkpoint import Checkpoint, CheckpointError, TensorInfo
from resin.models.loading.open import open_checkpoint_path

__all__ = ["Checkpoint", "CheckpointError", "TensorInfo", "open_checkpoint_path"]
