"""llmcomp makes large language models small: a checkpoint goes in, a compressed OpenVINO model comes out."""

__version__ = "0.1.0"
