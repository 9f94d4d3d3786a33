"""What a model sees when it reads: text or chats as token rows, pushed through it block by block, and statistics of every layer's input.

comes in: what --dataset says and the tokenizer of the source, or an int4 model that writes the text itself; the sections of a graph
goes out: Samples, rows of token ids without padding; prompts with completions; SiteStatistics of each section
may import: graph, kernels, options, checkpoint, errors, imports, threads
read first: load.py for the data, runner.py for the blocks
"""

from llmcomp.calibration.load import load_samples, samples_of
from llmcomp.calibration.pairs import Columns, read_pairs
from llmcomp.calibration.samples import Samples
from llmcomp.calibration.self_text import Starts, self_text, starts_of

__all__ = ["Columns", "Samples", "Starts", "load_samples", "read_pairs", "samples_of", "self_text", "starts_of"]
