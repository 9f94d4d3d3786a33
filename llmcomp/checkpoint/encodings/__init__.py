"""Weights that are stored quantized: what each way of storing them means, decoded exactly and a few rows at a time.

An encoding is one file with a subclass of `Encoding`; every module of this folder is looked at, so nothing else changes.

comes in: the quantization settings of a config.json, the stored tensors of its checkpoint
goes out: the tensors of the plain architecture: those that were stored as they are, and a DecodedTensor for each other
may import: errors, formats
read first: base.py
"""

from llmcomp.checkpoint.encodings.base import DecodedTensor, Encoding
from llmcomp.checkpoint.encodings.find import find, plain_config, plain_tensors

__all__ = ["DecodedTensor", "Encoding", "find", "plain_config", "plain_tensors"]
