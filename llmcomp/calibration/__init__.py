"""What a model sees when it reads: token rows pushed through it block by block, statistics of every layer's input.

comes in: token rows, a ModelGraph
goes out: SiteStatistics of each block, hidden states behind it
may import: errors, graph, kernels
read first: runner.py
"""
