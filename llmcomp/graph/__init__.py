"""The architecture's graph without weights, and what is known about its weights.

comes in: a Checkpoint
goes out: a ModelGraph: skeleton IR, layers, blocks
may import: checkpoint, openvino (torch and optimum only in the child process)
read first: layer.py
"""
