"""What compression did to a model: perplexity, KL divergence and agreement, of any OpenVINO folder, whoever wrote it.

comes in: folders, a reference, text
goes out: Scores, a Comparison
may import: openvino (nothing else of llmcomp, so that it judges a peer's model the same way)
read first: evaluate.py
"""

from llmcomp.judge.compare import Comparison, Judged, Settings, compare
from llmcomp.judge.errors import JudgeError
from llmcomp.judge.evaluate import evaluate
from llmcomp.judge.models import PROPERTIES, require_ir
from llmcomp.judge.prompts import PROMPTS, load_prompts
from llmcomp.judge.tally import Scores
from llmcomp.judge.text import Text, load_text

__all__ = [
    "PROMPTS",
    "PROPERTIES",
    "Comparison",
    "JudgeError",
    "Judged",
    "Scores",
    "Settings",
    "Text",
    "compare",
    "evaluate",
    "load_prompts",
    "load_text",
    "require_ir",
]
