"""What compression did to a model: perplexity, KL divergence and agreement, of any OpenVINO folder, whoever wrote it.

comes in: folders, a reference, text
goes out: Scores
may import: openvino (nothing else of llmcomp, so that it judges a peer's model the same way)
read first: evaluate.py
"""

from llmcomp.judge.errors import JudgeError
from llmcomp.judge.evaluate import evaluate
from llmcomp.judge.models import PROPERTIES
from llmcomp.judge.tally import Scores
from llmcomp.judge.text import Text, load_text

__all__ = ["PROPERTIES", "JudgeError", "Scores", "Text", "evaluate", "load_text"]
