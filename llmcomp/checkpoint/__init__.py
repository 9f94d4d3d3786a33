"""Where weights come from: a hub id, a folder of safetensors, a .gguf file. Headers are read at once, weights lazily.

comes in: a source as the user wrote it
goes out: a Checkpoint: config, tensors by name, rows of a tensor, tokenizer files
may import: errors, formats
read first: checkpoint.py
"""

from llmcomp.checkpoint.checkpoint import Checkpoint, TensorInfo
from llmcomp.checkpoint.source import open

__all__ = ["Checkpoint", "TensorInfo", "open"]
