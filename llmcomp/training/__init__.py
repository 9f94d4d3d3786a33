"""Training of what compression has lost: weights that are rounded in every forward pass, with adapters that vanish into their codes;
pruning and 8-bit quantization-aware training of any torch model.

comes in: torch weights; formats, scales and zero points of a compressed model; a teacher, a student and token rows, or prompts with completions; a torch model with data
goes out: torch modules whose weights are rounded as they will be stored, and these weights; pruned and quantized torch models that exporters know
may import: checkpoint, errors, formats, graph, options
read first: fake_quantize.py and quantized.py for weights, distill.py for the loop, objectives.py for what is learnt, nls.py for ranks; prune.py; qat.py
"""
