"""Training of what compression has lost: weights that are rounded in every forward pass, with adapters that vanish into their codes.

comes in: torch weights, formats, scales and zero points of a compressed model; a teacher, a student and token rows
goes out: torch modules whose weights are rounded as they will be stored, these weights, and a student that answers more like its teacher
may import: formats, errors
read first: fake_quantize.py for the weights, distill.py for the loop
"""
