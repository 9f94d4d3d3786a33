"""Ways to prune, to quantize and to leave a trained model, in NNCF's words."""

from __future__ import annotations

from enum import Enum


class PruneMode(str, Enum):
    """How pruning chooses the weights that become zero.

    LOCAL takes the smallest of each tensor; GLOBAL the smallest of all tensors together, each divided by its tensor's norm;
    REGULARIZATION_BASED learns the masks, under a loss that asks for the ratio.
    """

    UNSTRUCTURED_MAGNITUDE_LOCAL = "unstructured_magnitude_local"
    UNSTRUCTURED_MAGNITUDE_GLOBAL = "unstructured_magnitude_global"
    UNSTRUCTURED_REGULARIZATION_BASED = "unstructured_regularization_based"


class QuantizationPreset(str, Enum):
    """PERFORMANCE: activations and weights symmetric around zero; MIXED: activations with a zero point, weights symmetric."""

    PERFORMANCE = "performance"
    MIXED = "mixed"


class StripFormat(str, Enum):
    """What `strip` leaves of a weight that was rounded in training."""

    NATIVE = "native"
    """torch's own fake quantization of float weights."""
    DQ = "dq"
    """Packed codes, which are dequantized where the weight is used."""
    IN_PLACE = "in_place"
    """Float weights that have been rounded."""
