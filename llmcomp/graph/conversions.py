"""How transformers makes an architecture's parameters of a checkpoint's tensors, told as pieces (child process only)."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import ArchitectureError
from llmcomp.graph.match import find_tensor
from llmcomp.graph.pieces import Piece, Pieces

REMEDY = "Download the checkpoint again, or check config.json"


def stored_parameters(model: Any, checkpoint: Checkpoint, prefix: str) -> dict[str, Pieces]:
    """Parameter name -> what it is made of, by the loader's own table. What the table makes by other operations than these is left out:
    renaming, one matrix of each expert in a stack, matrices below each other, equal parts of one, a stack of matrices turned around."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    parameters = model.state_dict()
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    found: dict[str, Pieces] = {}
    merged: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in sorted(checkpoint.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, parameters)
        if pattern is None:
            found[target] = Pieces.of(name, checkpoint.tensors[name].shape)
        else:
            merged[target][pattern].append(name)
    for target, sources in merged.items():
        found |= _converted(target, sources, by_pattern[next(iter(sources))], checkpoint, shapes.get(target, ()))
    return found


def _check(target: str, sources: dict[str, list[str]], checkpoint: Checkpoint, wanted: tuple[int, ...]) -> None:
    """Refuse parts that do not fit together.

    Raises:
        ArchitectureError: as many of each kind as of the others, all as wide as the parameter: that does not hold.
    """
    if not wanted:
        return  # of no parameter of this model, as extra layers that predict further tokens are
    if {len(names) for names in sources.values()} != {wanted[0] if len(wanted) == 3 else 1}:
        counts = " and ".join(f"{len(names)} like {names[0]}" for names in sources.values())
        raise ArchitectureError(checkpoint.source, f"{target} {list(wanted)} cannot be made of {counts}", REMEDY)
    for names in sources.values():
        usual = Counter(checkpoint.tensors[name].shape for name in names).most_common(1)[0][0]
        for name in names:
            shape = checkpoint.tensors[name].shape
            if shape != usual or shape[1:] != wanted[max(1, len(wanted) - 1) :]:
                raise ArchitectureError(
                    f"{checkpoint.source}: tensor {name}", f"its shape is {list(shape)}, it is a part of {target} {list(wanted)}", REMEDY
                )


def _converted(
    target: str, sources: dict[str, list[str]], entry: Any, checkpoint: Checkpoint, wanted: tuple[int, ...]
) -> dict[str, Pieces]:
    operations = [(type(one).__name__, getattr(one, "dim", None)) for one in entry.operations]
    if any(pattern not in sources for pattern in entry.source_patterns):
        return {}
    columns = [[Pieces.of(name, checkpoint.tensors[name].shape) for name in sources[pattern]] for pattern in entry.source_patterns]
    if operations in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)], [("Concatenate", 0)]):
        if any(len(one.matrices) > 1 for column in columns for one in column):
            return {}
        _check(target, sources, checkpoint, wanted)
        return {target: Pieces(tuple(tuple(p for one in row for p in one.matrices[0]) for row in zip(*columns, strict=True)))}
    if operations == [("Chunk", 0)]:
        (piece,) = columns[0][0].matrices[0]
        first, count = entry.target_patterns[0], len(entry.target_patterns)
        step = piece.rows // count
        names = [target.replace(first, other, 1) for other in entry.target_patterns]
        return {name: Pieces(((Piece(piece.tensor, step, i * step),),)) for i, name in enumerate(names)}
    if operations == [("Transpose", None)] and {entry.operations[0].dim0, entry.operations[0].dim1} == {1, 2}:
        name = sources[entry.source_patterns[0]][0]
        shape = checkpoint.tensors[name].shape
        if len(shape) != 3 or (entry.operations[0].check_dims and wanted == shape):
            return {target: Pieces.of(name, shape)}
        return {target: Pieces(tuple((Piece(name, shape[2], index=i, transposed=True),) for i in range(shape[0])))}
    return {}


def pieces_of(name: str, checkpoint: Checkpoint, stored: dict[str, Pieces], prefix: str) -> Pieces | None:
    """What a parameter is made of: the stored tensor of its name, or what the loader would make."""
    tensor = find_tensor(name, checkpoint.tensors, prefix)
    return Pieces.of(tensor, checkpoint.tensors[tensor].shape) if tensor else stored.get(name)
