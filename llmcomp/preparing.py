"""Preparing, the stages in front of the plan: the checkpoint opened, its graph traced, data at hand.

comes in: options
goes out: a Checkpoint, a ModelGraph for each submodel, Data
may import: calibration, checkpoint, errors, graph, inspect, kernels, options, planning, running, writing
read first: prepared
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from llmcomp import checkpoint as checkpoints
from llmcomp import kernels, planning
from llmcomp.calibration import Samples, samples_of, self_text, starts_of
from llmcomp.calibration.load import AUTO, row_length
from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import ArchitectureError, CheckpointError, OptionError
from llmcomp.graph.model import ModelGraph, make_graphs, unused_tensors
from llmcomp.graph.skeleton import get_skeletons
from llmcomp.inspect import compressed_layers
from llmcomp.options import ExportOptions
from llmcomp.running import Run
from llmcomp.writing.finite import check_kept, empty_layers
from llmcomp.writing.resume import SAMPLES, Unfinished
from llmcomp.writing.tokenizer import Conversion

GENERATES = "text-generation"
Export = Callable[[ExportOptions], object]
"""Writes the model that makes its own calibration text."""


def open_checkpoint(options: ExportOptions) -> Checkpoint:
    _refuse_compressed(Path(options.model))
    checkpoint = checkpoints.open(
        options.model, revision=options.revision, token=options.token, cache_dir=options.cache_dir, adapter=options.adapter
    )
    if options.weight_format == planning.KEEP and options.plan is None and not any(map(checkpoint.encoded, checkpoint.tensors)):
        raise OptionError(
            f"--weight-format {planning.KEEP}",
            f"nothing in {checkpoint.source} is stored quantized, so there are no codes to keep",
            "Use fp16 or fp32 for a float model, or a format that weights are rounded to",
        )
    if not options.no_tokenizer:
        checkpoint.check_tokenizer()
    return checkpoint


def _refuse_compressed(folder: Path) -> None:
    """Raises CheckpointError for an OpenVINO model that is compressed already, and says how. Others the checkpoint itself refuses."""
    if not (folder / "openvino_model.xml").is_file() or any(folder.glob("*.safetensors")):
        return
    held = compressed_layers(folder)
    if held:
        raise CheckpointError(
            str(folder), f"already compressed: {held}", "Give the Hugging Face checkpoint that it was made from; rounding twice loses twice"
        )


Graphs = tuple[ModelGraph, ...]
"""One, or one for each submodel."""


def trace(checkpoint: Checkpoint, options: ExportOptions, run: Run) -> Graphs:
    """
    Raises:
        OptionError: options that only make sense for a model of one graph, where there are several.
    """
    with run.stage("graph"):
        skeletons = get_skeletons(checkpoint, options.task, options.trust_remote_code)
        graphs = make_graphs(skeletons, checkpoint)
        for graph in graphs:
            check_kept(graph, kernels.non_finite)
    empty = [name for graph in graphs for name in empty_layers(graph)]
    if empty:
        run.warn(f"{len(empty)} weights hold nothing but zeros where they were looked at, {empty[0]} for one: is the checkpoint whole?")
    if skeletons[0].cached:
        run.progress.note("the traced graph comes from the cache")
    if checkpoint.doubt:
        run.warn(checkpoint.doubt)
    if skeletons[0].fallback:
        run.warn(f"traced over the mapped weights, not as an empty skeleton: {skeletons[0].fallback}")
    unused = unused_tensors(graphs)
    _check_blocks(graphs, unused)
    if unused:
        run.warn(f"{len(unused)} tensors of the checkpoint are not used by the architecture, {unused[0]} for one; all are in the report")
    looking = [flag for flag, on in planning.looks_at_text(options).items() if on]
    if looking:
        only(graphs, " ".join(looking))
    return graphs


BLOCK = re.compile(r"(.*?\.)(\d+)\.")
"""A block's tensors: what all blocks are called, its number."""
PREDICTING = "num_nextn_predict_layers"
"""Of a config: blocks behind the last that guess further tokens, which no exporter takes along."""


def _check_blocks(graphs: Graphs, unused: Sequence[str]) -> None:
    """Raises ArchitectureError for blocks behind the last that the architecture has: half a model would come out, and run."""
    used: dict[str, int] = {}
    for name in set().union(*(graph.used for graph in graphs)):
        if found := BLOCK.match(name):
            used[found[1]] = max(used.get(found[1], -1), int(found[2]))
    checkpoint = graphs[0].checkpoint
    known = checkpoint.config.get(PREDICTING)
    behind = {
        (found[1], int(found[2])): name for name in unused if (found := BLOCK.match(name)) and int(found[2]) > used.get(found[1], 1 << 60)
    }
    if len(behind) > (known if isinstance(known, int) else 0):
        stem, number = max(behind, key=lambda one: one[1])
        raise ArchitectureError(
            checkpoint.source,
            f"the checkpoint has {behind[stem, number]}, and what config.json describes ends with {stem}{used[stem]}",
            "Set the number of blocks there (num_hidden_layers) to what is stored, or remove the tensors",
        )


def only(graphs: Graphs, what: str) -> ModelGraph:
    """The one graph of a model that generates text.

    Raises:
        OptionError: `what` needs such a model, and this is none.
    """
    task = graphs[0].skeleton.task
    if len(graphs) > 1 or not task.startswith(GENERATES):
        several = f", as {' and '.join(graph.skeleton.name for graph in graphs)}" if len(graphs) > 1 else ""
        raise OptionError(
            what,
            f"it needs a model that generates text from text alone, and this one is exported for {task}{several}",
            "Leave it out; rounding without data, --scale-rule search and overrides work for every model",
        )
    return graphs[0]


@dataclass
class Data:
    """Calibration data, made when it is first asked for."""

    checkpoint: Checkpoint
    options: ExportOptions
    folder: Path
    run: Run
    tokenizer: Conversion | None
    samples: Samples | None
    export: Export
    unfinished: Unfinished | None = None
    """Where what is slow to make is kept for another run to go on with."""

    def finish_tokenizer(self) -> None:
        """The tokenizer's files are in the folder, if they are wanted at all."""
        if self.tokenizer is not None:
            with self.run.stage("tokenizer"):
                self.tokenizer.finish()
            self.tokenizer = None

    def get(self) -> Samples:
        self.finish_tokenizer()
        if self.samples is None:
            kept = self.unfinished.text(SAMPLES) if self.unfinished else None
            if kept is not None:
                self.samples = Samples.from_json(kept)
            else:
                with self.run.stage("own text"):
                    self.samples = _own_text(self.checkpoint, self.options, self.folder, self.export)
                if self.unfinished:
                    self.unfinished.keep_text(SAMPLES, self.samples.to_json())
        self.run.use(self.samples)
        return self.samples

    def check_used(self) -> None:
        """Warns of data that nothing has asked for."""
        if self.samples is not None and self.run.used is None:
            self.run.warn(f"{self.samples.source} is not used: nothing in the plan looks at data")


@contextmanager
def prepared(options: ExportOptions, run: Run, looks_at_data: bool, export: Export) -> Iterator[tuple[Graphs, Data]]:
    """Graphs and their data, where no folder is to be filled."""
    checkpoint = open_checkpoint(options)
    named = looks_at_data and options.dataset not in (None, AUTO)
    samples = samples_of(options, checkpoint) if named else None
    with TemporaryDirectory(prefix="llmcomp-own-text-") as folder:
        if looks_at_data and not named and not options.no_tokenizer:
            checkpoint.save_tokenizer(Path(folder))
        yield trace(checkpoint, options, run), Data(checkpoint, options, Path(folder), run, None, samples, export)


def _own_text(checkpoint: Checkpoint, options: ExportOptions, folder: Path, export: Export) -> Samples:
    """Text that the model's own data-free int4 result writes; `folder` has the tokenizer, and room for that model while it writes."""
    with TemporaryDirectory(prefix=".own-text-", dir=folder) as scratch:
        same = options.model_dump(include={"model", "task", "revision", "cache_dir", "adapter", "trust_remote_code"})
        plain = Path(scratch) / "int4"
        export(ExportOptions(**same, token=options.token, output=plain, no_tokenizer=True, verify="none"))
        stored = checkpoint.folder / "generation_config.json" if checkpoint.folder is not None else None
        generation = json.loads(stored.read_text(encoding="utf8")) if stored is not None and stored.is_file() else None
        starts = starts_of(checkpoint.config, generation, None if options.no_tokenizer else folder)
        return self_text(plain, starts, options.num_samples, row_length(options, checkpoint.config), options.seed)
