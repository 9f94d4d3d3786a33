"""Which layer gets which format: NNCF's rules, corrected, as a plan that a person can read and edit.

comes in: layers, options, sensitivity scores where a ratio needs them
goes out: a Plan with exact sizes
may import: formats, graph, options, calibration statistics
read first: assign.py
"""

from llmcomp.planning.assign import make_plan
from llmcomp.planning.check import COMPRESSION_FIELDS, check_options, is_low, needs_scores
from llmcomp.planning.devices import runs_packed
from llmcomp.planning.plan import LayerPlan, Plan, Summary
from llmcomp.planning.scheme import (
    FLOATS,
    SCALE_ESTIMATION,
    SEARCH,
    Scheme,
    adapters,
    float_type,
    layer_bytes,
    layer_chain,
    layer_parts,
    stored,
)

__all__ = [
    "COMPRESSION_FIELDS",
    "FLOATS",
    "SCALE_ESTIMATION",
    "SEARCH",
    "LayerPlan",
    "Plan",
    "Scheme",
    "Summary",
    "adapters",
    "check_options",
    "float_type",
    "is_low",
    "layer_bytes",
    "layer_chain",
    "layer_parts",
    "make_plan",
    "needs_scores",
    "runs_packed",
    "stored",
]
