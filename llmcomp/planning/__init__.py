"""Which layer gets which format: NNCF's rules, corrected, as a plan that a person can read and edit.

comes in: layers, options, sensitivity scores where a ratio needs them
goes out: a Plan with exact sizes
may import: formats, graph, options, calibration statistics
read first: assign.py
"""

from llmcomp.planning.assign import make_plan
from llmcomp.planning.candidates import candidates, fitting, not_measured, ranked_by_loss
from llmcomp.planning.check import COMPRESSION_FIELDS, DATA_FREE, PREDICTED, check_options, is_low, looks_at_text, needs_data, needs_scores
from llmcomp.planning.devices import runs_packed
from llmcomp.planning.measured import Measured, MeasuredLayer, candidate
from llmcomp.planning.plan import NOT_CALIBRATED, Budget, LayerPlan, Plan, Point, Summary
from llmcomp.planning.scheme import (
    FLOATS,
    KEEP,
    ORDER,
    SCALE_ESTIMATION,
    SEARCH,
    STORED,
    Scheme,
    adapter_bytes,
    adapters,
    float_type,
    layer_bytes,
    layer_chain,
    layer_parts,
    nominal_bits,
    stored,
)
from llmcomp.planning.share import Fallback, Share, scheme_of, scheme_text

__all__ = [
    "COMPRESSION_FIELDS",
    "DATA_FREE",
    "FLOATS",
    "KEEP",
    "NOT_CALIBRATED",
    "ORDER",
    "PREDICTED",
    "SCALE_ESTIMATION",
    "SEARCH",
    "STORED",
    "Budget",
    "Fallback",
    "LayerPlan",
    "Measured",
    "MeasuredLayer",
    "Plan",
    "Point",
    "Scheme",
    "Share",
    "Summary",
    "adapter_bytes",
    "adapters",
    "candidate",
    "candidates",
    "check_options",
    "fitting",
    "float_type",
    "is_low",
    "layer_bytes",
    "layer_chain",
    "layer_parts",
    "looks_at_text",
    "make_plan",
    "needs_data",
    "needs_scores",
    "nominal_bits",
    "not_measured",
    "ranked_by_loss",
    "runs_packed",
    "scheme_of",
    "scheme_text",
    "stored",
]
