from __future__ import annotations

from llmcomp.graph.match import find_tensor, missing_tensors_error, near_names


def test_the_base_prefix_may_be_there_or_not() -> None:
    assert find_tensor("transformer.h.0.w", {"h.0.w"}, "transformer") == "h.0.w"
    assert find_tensor("h.0.w", {"transformer.h.0.w"}, "transformer") == "transformer.h.0.w"
    assert find_tensor("h.0.w", {"h.1.w"}, "transformer") is None


def test_the_likely_match_is_of_the_same_layer() -> None:
    stored = ["model.layers.1.attn.q_proj.weight", "model.layers.11.self_attn.q_proj.weight"]
    assert near_names("model.layers.1.self_attn.q_proj.weight", stored) == ["model.layers.1.attn.q_proj.weight"]
    error = missing_tensors_error(["model.layers.1.self_attn.q_proj.weight"], stored, "src")
    assert "stored as model.layers.1.attn.q_proj.weight?" in str(error) and "src" in str(error)
