"""The child process that traces an architecture into an IR without weights (`python -m llmcomp.graph.trace JOB`).

Here, and only here on the export path, torch, transformers and optimum are imported; the parent reads no weight before this process is gone.
Two ways lead to the same files:

* *empty*: parameters of Linear, Embedding and Conv1D are placeholders, views at distinct addresses into one zeroed buffer as large as the
  largest matrix; every other parameter and buffer has its real value, since values shape the graph (an all-zero bias makes an Add vanish).
* *mapped*: the ordinary loader, whose parameters point into the mapped safetensors files. The fall-back for everything else.

Either way constants are matched to checkpoint tensors by address, never by name, and leave the graph as Parameters named `llmcomp.weight.N`;
what stays behind (norms, tables, what nothing explains) is written to the skeleton's own small .bin.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmcomp.checkpoint import Checkpoint
from llmcomp.errors import ArchitectureError, LlmcompError
from llmcomp.graph.bounds import NO_MEMORY, bounded_parameters, config_error, is_memory, limit_memory, one_line
from llmcomp.graph.conversions import pieces_of, stored_parameters
from llmcomp.graph.match import find_tensor, missing_tensors_error
from llmcomp.graph.pieces import Pieces
from llmcomp.graph.skeleton import CONFIG, EXAMPLE, MANIFEST, XML
from llmcomp.imports import TELEMETRY, hide

WEIGHT_PREFIX = "llmcomp.weight."
LARGE = 1 << 20
"""Bytes from which an unexplained constant makes an empty trace fall back to the mapped one."""
ALIGN = 64

MOST_VALUES = 256 << 20
"""Bytes of float32 that matrices may take which must be traced with their values."""
FUSED = "gate_up_proj"
"""What architectures call a stack of experts' gates and ups."""


@dataclass(frozen=True)
class Placed:
    """A matrix or a stack of them that a placeholder stands for."""

    uses: list[tuple[Any, str, str]]
    """(module, name in it, full name)."""
    pieces: Pieces
    label: str
    """The stored tensor, or the parameter that is made of several."""
    shape: tuple[int, ...]

    def half(self, number: int) -> Placed:
        """Gates or ups of a fused stack."""
        name = self.uses[0][2].removesuffix(FUSED) + ("gate_proj", "up_proj")[number]
        return Placed(self.uses, self.pieces.halves()[number], name, (self.shape[0], self.shape[1] // 2, self.shape[2]))

    def matrix(self, number: int) -> Placed:
        """One expert's of a stack."""
        name = f"{self.uses[0][2].removesuffix('.weight')}.{number}.weight"
        return Placed(self.uses, Pieces((self.pieces.matrices[number],)), name, self.shape[1:])


class ContractError(Exception):
    """The empty trace does not hold for this architecture; the reason is for the report. It may hold if `tensors` are real."""

    def __init__(self, reason: str, tensors: Collection[str] = ()) -> None:
        super().__init__(reason)
        self.tensors = frozenset(tensors)


def main(job_file: str) -> int:
    job = json.loads(Path(job_file).read_text(encoding="utf8"))
    out = Path(job["out"])
    try:
        manifest = trace(job, out)
    except LlmcompError as error:
        answer = {"error": type(error).__name__, "thing": error.thing, "reason": error.reason, "remedy": error.remedy}
    except Exception as error:
        told = NO_MEMORY if is_memory(error) else f"{type(error).__name__}: {error}"
        answer = {"error": "crash", "thing": told, "reason": traceback.format_exc(), "remedy": ""}
    else:
        answer = manifest
    (out / MANIFEST).write_text(json.dumps(answer, indent=1), encoding="utf8")
    return 0 if "error" not in answer else 1


def trace(job: dict[str, Any], out: Path) -> dict[str, Any]:
    """Write a folder with `skeleton.xml` and `skeleton.bin` for each submodel into `out` and return the manifest."""
    # sklearn comes in with transformers' assisted generation, 1.6 s; nothing here uses it.
    hide(TELEMETRY, "sklearn")
    from llmcomp.checkpoint import open as open_checkpoint

    warnings.filterwarnings("ignore")
    checkpoint = open_checkpoint(**job["open"])
    limit_memory(checkpoint)
    reason = None
    with tempfile.TemporaryDirectory() as scratch:
        folder = checkpoint.folder or _config_folder(checkpoint, Path(scratch))
        task, auto_class = _task(checkpoint, folder, job)
        try:
            model, real, found = _traced_empty(checkpoint, folder, auto_class, task, out, job["trust_remote_code"])
        except ContractError as error:
            if checkpoint.folder is None or not checkpoint.plain:
                raise ArchitectureError(
                    checkpoint.source,
                    f"the skeleton cannot be made: {error}",
                    "Export a plain safetensors checkpoint of this model instead.",
                ) from None
            reason = str(error)
            model, addresses, real = _mapped_model(checkpoint, folder, auto_class, job["trust_remote_code"], reason)
            found = _export(model, addresses, task, out, job["trust_remote_code"], None)
            # What was mapped and then copied by the exporter (routers) is in the graph by value.
            real |= {one.label for one in addresses.values()} - {w["tensor"] for weights in found.values() for w in weights}
    return {
        "task": task,
        "model_type": model.config.model_type,
        "models": [{"name": name, "weights": weights} for name, weights in found.items()],
        "real": sorted(real),
        "fallback": reason,
    }


def _traced_empty(
    checkpoint: Checkpoint, folder: Path, auto_class: Any, task: str, out: Path, trust: bool
) -> tuple[Any, set[str], dict[str, list[dict[str, Any]]]]:
    """(model, names of real tensors, submodel -> its weights). Where placeholders do not do for a few matrices, because a graph reads them as no
    matrices or not at all, it is traced once more with their values.

    Raises:
        ContractError: they do not do.
    """
    wanted: frozenset[str] = frozenset()
    while True:
        model, addresses, real, known = _empty_model(checkpoint, folder, auto_class, trust, wanted)
        try:
            found = _export(model, addresses, task, out, trust, known)
        except ContractError as error:
            more = error.tensors - wanted
            size = sum(4 * int(np.prod(checkpoint.tensors[name].shape)) for name in wanted | more)
            if not more or size > MOST_VALUES:
                raise
            wanted |= more
            continue
        # What is in no graph was not needed.
        return model, real - {name for name in wanted if not known.is_seen(name)}, found


def _config_folder(checkpoint: Checkpoint, scratch: Path) -> Path:
    (scratch / "config.json").write_text(json.dumps(checkpoint.config), encoding="utf8")
    return scratch


def _plain_config(folder: Path, trust: bool) -> Any:
    """The architecture's configuration, without how the weights are stored: the checkpoint decodes them."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust)
    for one in (config, getattr(config, "text_config", None)):
        for name in ("quantization_config", "compression_config"):
            if hasattr(one, name):
                delattr(one, name)
    return config


PROVEN = {"gemma": "5.5.4", "gemma3_text": "5.5.4", "gemma4_text": "5.5.4"}
"""Architectures whose exporter sets its window narrower than it works: up to this transformers version the exported model gives transformers'
own logits (tests/calibration/test_architectures.py). gemma2's does not: it is off by a thousandth of the largest."""


def _task(checkpoint: Checkpoint, folder: Path, job: dict[str, Any]) -> tuple[str, Any]:
    """The exporter's task and the Auto class for it; refuses what the exporter does not know, before any tracing."""
    import optimum.exporters.openvino  # noqa: F401  registers the OpenVINO configurations
    from optimum.exporters.tasks import TasksManager

    try:
        config = _plain_config(folder, job["trust_remote_code"])
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ArchitectureError(
                checkpoint.source, "the model brings its own code", "Read that code, then repeat with --trust-remote-code."
            ) from None
        if is_memory(error) or _is_known(checkpoint.config.get("model_type")):
            raise config_error(checkpoint, NO_MEMORY if is_memory(error) else one_line(error)) from None
        raise ArchitectureError(
            f"architecture {checkpoint.config.get('model_type')!r}", "transformers does not know it", "Check model_type in config.json."
        ) from None
    field = "export_model_type" if getattr(config, "export_model_type", None) else "model_type"
    model_type = getattr(config, field)
    try:
        tasks = TasksManager.get_supported_tasks_for_model_type(str(model_type), "openvino", library_name="transformers")
    except KeyError:
        raise ArchitectureError(
            f"architecture {model_type!r} ({field} in config.json)",
            "optimum-intel has no OpenVINO exporter for it",
            "See its list of supported architectures; a newer optimum-intel may have it.",
        ) from None
    task = job.get("task") or "auto"
    if task == "auto":
        task = _inferred(checkpoint.config.get("architectures") or [], tasks)
    task = TasksManager.map_from_synonym(task)
    if not task.endswith("-with-past") and f"{task}-with-past" in tasks:
        task += "-with-past"
    if task not in tasks:
        raise ArchitectureError(
            f"architecture {model_type!r}",
            f"the exporter does not support the task {task!r}",
            f"Choose --task from {', '.join(sorted(tasks))}.",
        )
    _check_versions(model_type, task)
    return task, TasksManager.get_model_class_for_task(task, framework="pt", model_type=config.model_type, library="transformers")


CONDITIONAL = ("image-text-to-text", "text2text-generation", "automatic-speech-recognition", "image-to-text")
"""Tasks of what transformers calls ForConditionalGeneration, which its own table gives other names for some."""


def _inferred(architectures: list[str], tasks: Collection[str]) -> str:
    """The task that a config's `architectures` mean, one of `tasks` where these have it."""
    from optimum.exporters.tasks import TasksManager

    if not architectures or any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
        return "text-generation"
    conditional = next((task for task in CONDITIONAL if task in tasks), None)
    if conditional and any(name.endswith("ForConditionalGeneration") for name in architectures):
        return conditional
    return str(TasksManager._infer_task_from_model_or_model_class(model_class=_class_of(architectures)))


def _is_known(model_type: Any) -> bool:
    from transformers import CONFIG_MAPPING

    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def _check_versions(model_type: str, task: str) -> None:
    """The exporter's own window of transformers versions, asked before anything is built."""
    import transformers
    from optimum.exporters.tasks import TasksManager
    from packaging.version import Version

    constructor = TasksManager.get_exporter_config_constructor("openvino", model_type=model_type, task=task, library_name="transformers")
    wanted = getattr(constructor, "func", constructor)
    proven = PROVEN.get(model_type)
    if proven is not None and Version(transformers.__version__) <= Version(proven):
        wanted.MAX_TRANSFORMERS_VERSION = proven
    for bound, outside in (("MIN", Version.__lt__), ("MAX", Version.__gt__)):
        limit = getattr(wanted, f"{bound}_TRANSFORMERS_VERSION", None)
        if limit is not None and outside(Version(transformers.__version__), Version(str(limit))):
            raise ArchitectureError(
                f"architecture {model_type!r}",
                f"optimum-intel exports it with transformers {'from' if bound == 'MIN' else 'up to'} {limit}, {transformers.__version__} is installed",
                "Install such a version in an environment of its own",
            )


def _class_of(architectures: list[str]) -> Any:
    import transformers

    for name in architectures:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    raise ArchitectureError(f"architectures {architectures} in config.json", "the task cannot be told from it", "Give it with --task.")


class Known:
    """Real values, and which of them were seen in a graph."""

    def __init__(self) -> None:
        self._by_size: dict[int, list[tuple[frozenset[str], Any]]] = defaultdict(list)
        self._seen: set[str] = set()

    def add(self, tensors: Collection[str], value: Any) -> None:
        """`value`, a torch tensor, is made of these tensors of the checkpoint."""
        # Of a stack of experts a graph may hold one matrix after the other.
        for one in (value, *(value if value.ndim == 3 else ())):
            self._by_size[one.numel()].append((frozenset(tensors), one))

    def explains(self, constant: Any) -> bool:
        """Whether a constant of a graph has the numbers of one of them, whatever its type and axes of length one."""
        if not constant.get_element_type().is_real():
            return False
        same = self._by_size.get(int(np.prod(constant.get_output_shape(0))), [])
        if not same:
            return False
        flat = np.asarray(constant.data, np.float32).reshape(-1)
        matching = [names for names, value in same if np.array_equal(flat, value.float().numpy().reshape(-1))]
        self._seen.update(*matching)
        return bool(matching)

    def is_seen(self, tensor: str) -> bool:
        return tensor in self._seen


def _empty_model(
    checkpoint: Checkpoint, folder: Path, auto_class: Any, trust: bool, wanted: frozenset[str]
) -> tuple[Any, dict[int, Placed], set[str], Known]:
    """The model with placeholders for its matrices but `wanted`: (model, address -> what is there, names of the tensors whose values are real, these
    values)."""
    import torch
    from accelerate import init_empty_weights
    from transformers.pytorch_utils import Conv1D

    config = _plain_config(folder, trust)
    with bounded_parameters(checkpoint), init_empty_weights(include_buffers=False):
        # Tables that an architecture computes (positions) are as exact as the checkpoint's own type makes them, with transformers too.
        model = auto_class.from_config(config, dtype=_own_type(checkpoint), trust_remote_code=trust)
    prefix = getattr(model, "base_model_prefix", "")
    compared = _tie(model, checkpoint, prefix)
    stored = stored_parameters(model, checkpoint, prefix)
    homes: dict[int, list[tuple[Any, str, str]]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            full = f"{module_name}.{name}" if module_name else name
            homes.setdefault(id(parameter), []).append((module, name, full))

    kinds = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
    matrices: list[Placed] = []
    experts: list[Placed] = []
    others: list[tuple[list[tuple[Any, str, str]], Pieces]] = []
    missing: list[str] = []
    for uses in homes.values():
        pieces = next((p for _, _, full in uses if (p := pieces_of(full, checkpoint, stored, prefix))), None)
        module, name, full = uses[0]
        if pieces is None:
            missing.append(full)
            continue
        parameter = getattr(module, name)
        shape = pieces.shape(checkpoint)
        if tuple(parameter.shape) != shape:
            raise ContractError(f"{' + '.join(pieces.tensors[:2])} has shape {shape}, the architecture wants {tuple(parameter.shape)}")
        if wanted & set(pieces.tensors):
            others.append((uses, pieces))
        elif name == "weight" and parameter.ndim == 2 and all(isinstance(m, kinds) or hasattr(m, "num_experts") for m, _, _ in uses):
            matrices.append(Placed(uses, pieces, pieces.whole or full, shape))
        elif parameter.ndim == 3 and hasattr(module, "num_experts"):
            experts.append(Placed(uses, pieces, pieces.whole or full, shape))
        else:
            others.append((uses, pieces))
    if missing:
        used = {t for one in (*matrices, *experts) for t in one.pieces.tensors} | {t for _, pieces in others for t in pieces.tensors}
        if checkpoint.folder is None or not checkpoint.plain:
            raise missing_tensors_error(missing, set(checkpoint.tensors) - used, checkpoint.source)
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise ContractError(f"the checkpoint stores {missing[0]}{more} in another form")

    real = {tensor for _, pieces in others for tensor in pieces.tensors} | compared
    known = Known()
    for uses, pieces in others:
        value = torch.nn.Parameter(_torch(pieces.values(checkpoint)), requires_grad=False)
        known.add(pieces.tensors, value.data)
        for module, name, _ in uses:
            setattr(module, name, value)
    # The exporter takes 16-bit weights of these very classes as they are, and casts those of others (embeddings that scale) to f32.
    plain = [one for one in matrices if all(type(module) in kinds for module, _, _ in one.uses)]
    cast = [one for one in matrices if one not in plain]
    addresses = {**_place(plain, 0), **_place(cast, 1, torch.float32), **_place_experts(experts)}
    for name, buffer in model.named_buffers():
        tensor = find_tensor(name, checkpoint.tensors, prefix)
        if tensor is not None and tuple(buffer.shape) == tuple(checkpoint.tensors[tensor].shape):
            buffer.data = _torch(checkpoint.read(tensor))
            real.add(tensor)
    return model, addresses, real, known


def _own_type(checkpoint: Checkpoint) -> Any:
    """The torch type of most of a checkpoint's numbers."""
    import torch

    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        sizes[tensor.dtype] += int(np.prod(tensor.shape))
    return next((kinds[name] for name, _ in sizes.most_common() if name in kinds), torch.bfloat16)


def _tie(model: Any, checkpoint: Checkpoint, prefix: str) -> set[str]:
    """Tie as the loader does: a pair that the checkpoint stores twice stays apart, unless both are the same bytes. Returns what was compared."""
    missing = {name for name, _ in model.named_parameters() if find_tensor(name, checkpoint.tensors, prefix) is None}
    compared: set[str] = set()
    apart: list[str] = []
    for target, source in getattr(model, "all_tied_weights_keys", {}).items():
        pair = [find_tensor(name, checkpoint.tensors, prefix) for name in (target, source)]
        if pair[0] is None or pair[1] is None or pair[0] == pair[1]:
            continue
        compared |= {pair[0], pair[1]}
        if np.array_equal(checkpoint.read(pair[0]), checkpoint.read(pair[1])):
            missing.add(target)
        else:
            apart.append(target)
    for target in apart:
        # The loader would compare the values, which are placeholders here.
        model.all_tied_weights_keys.pop(target)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    return compared


def _place(matrices: list[Placed], seed: int, kind: Any = None) -> dict[int, Placed]:
    """Give each matrix a view of its own address."""
    import torch

    addresses = {}
    for one, view in zip(matrices, _views([one.shape for one in matrices], seed, kind), strict=True):
        value = torch.nn.Parameter(view, requires_grad=False)
        for module, name, _ in one.uses:
            setattr(module, name, value)
        addresses[view.data_ptr()] = one
    return addresses


def _place_experts(experts: list[Placed]) -> dict[int, Placed]:
    """As `_place`, for stacks, which the exporter casts to f32: both halves of a fused gate and up, and the matrices of what is called a weight, get
    views of their own, too, since forwards of experts cut them apart, and a constant that is cut would be copied."""
    import torch

    class Fused(torch.Tensor):  # type: ignore[misc]
        """A stack that gives its halves without cutting."""

        halves: tuple[torch.Tensor, torch.Tensor]

        def chunk(self, chunks: int, dim: int = 0) -> Any:
            return self.halves if chunks == 2 and dim % 3 == 1 else super().chunk(chunks, dim)

        def __getitem__(self, key: Any) -> Any:
            middle, everything = self.shape[1] // 2, slice(None)
            for half, rows in zip(self.halves, (slice(None, middle), slice(middle, None)), strict=True):
                if key == (everything, rows, everything):
                    return half
            return super().__getitem__(key)

    class Listed(torch.Tensor):  # type: ignore[misc]
        """A stack that gives one expert's matrix without cutting."""

        matrices: tuple[torch.Tensor, ...]

        def __getitem__(self, key: Any) -> Any:
            return self.matrices[key] if isinstance(key, int) else super().__getitem__(key)

    whole = _place(experts, 2, torch.float32)
    fused = [one for one in experts if one.uses[0][1] == FUSED and not getattr(one.uses[0][0], "is_transposed", False)]
    listed = [one for one in experts if one.uses[0][1] == "weight"]
    cut = [one.half(i) for one in fused for i in range(2)]
    single = [one.matrix(i) for one in listed for i in range(one.shape[0])]
    views = list(_views([one.shape for one in (*cut, *single)], 3, torch.float32))
    for i, one in enumerate(fused):
        for module, name, _ in one.uses:
            stack = getattr(module, name).data.as_subclass(Fused)
            stack.halves = (views[2 * i], views[2 * i + 1])
            delattr(module, name)
            # No Parameter: those are cast, and lose their class.
            setattr(module, name, stack)
    rest = iter(views[len(cut) :])
    for one in listed:
        matrices = tuple(next(rest) for _ in range(one.shape[0]))
        for module, name, _ in one.uses:
            stack = getattr(module, name).data.as_subclass(Listed)
            stack.matrices = matrices
            delattr(module, name)
            setattr(module, name, stack)
    return {**whole, **{view.data_ptr(): one for view, one in zip(views, (*cut, *single), strict=True)}}


def _views(shapes: list[tuple[int, ...]], seed: int, kind: Any = None) -> Iterator[Any]:
    """Tensors of their own address in one buffer of bfloat16 or `kind`; calloc'd pages that nobody touches cost no memory."""
    import torch

    if not shapes:
        return
    largest = max(int(np.prod(shape)) for shape in shapes)
    step = ALIGN // 2
    scale = 1 if kind is None else kind.itemsize // 2
    buffer = np.zeros((largest + step * len(shapes)) * scale, np.uint16)
    # The exporter merges equal constants: a different start in each view, and in each buffer, keeps them apart.
    count = step * len(shapes) * scale
    buffer[:count] = np.random.default_rng(seed).integers(0x3F00, 0x3FFF, count, dtype=np.uint16)
    flat = torch.from_numpy(buffer.view(np.int16)).view(kind or torch.bfloat16)
    for i, shape in enumerate(shapes):
        yield flat[i * step : i * step + int(np.prod(shape))].view(*shape)


def _mapped_model(
    checkpoint: Checkpoint, folder: Path, auto_class: Any, trust: bool, reason: str
) -> tuple[Any, dict[int, Placed], set[str]]:
    """The model as transformers loads it, its parameters mapped. Only parameters that are bytes of one stored tensor are explained.

    `reason` is why there is no other way.
    """
    import torch

    try:
        model, info = auto_class.from_pretrained(
            folder, dtype="auto", trust_remote_code=trust, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:
        raise ArchitectureError(
            checkpoint.source, f"{reason}, and transformers does not load it either ({one_line(error)})", "Check config.json"
        ) from error
    prefix = getattr(model, "base_model_prefix", "")
    for name, stored, wanted in sorted(info.get("mismatched_keys", ())):
        raise ArchitectureError(
            f"{checkpoint.source}: tensor {name}",
            f"its shape is {list(stored)}, the architecture wants {list(wanted)}",
            "Check config.json",
        )
    bad = sorted(info["missing_keys"])
    if bad:
        taken = {find_tensor(name, checkpoint.tensors, prefix) for name in model.state_dict()}
        raise missing_tensors_error(bad, set(checkpoint.tensors) - taken, checkpoint.source)
    addresses, real = {}, set(checkpoint.tensors)
    for name, parameter in model.named_parameters():
        tensor = find_tensor(name, checkpoint.tensors, prefix)
        if tensor is None or parameter.ndim != 2 or not _same(parameter, checkpoint, tensor, torch):
            continue
        shape = tuple(parameter.shape)
        addresses[parameter.data_ptr()] = Placed([], Pieces.of(tensor, shape), tensor, shape)
        real.discard(tensor)
    return model, addresses, real


def _same(parameter: Any, checkpoint: Checkpoint, tensor: str, torch: Any) -> bool:
    """The parameter is the stored tensor: same shape and type, equal first and last rows."""
    info = checkpoint.tensors[tensor]
    if tuple(parameter.shape) != tuple(info.shape):
        return False
    for start in (0, info.shape[0] - 1):
        stored = _torch(checkpoint.rows(tensor, start, start + 1))
        if stored.dtype != parameter.dtype or not torch.equal(stored, parameter.data[start : start + 1]):
            return False
    return True


def _torch(array: np.ndarray) -> Any:
    """A torch tensor with a numpy array's values, bfloat16 included (a copy: the array may be a read-only mapping)."""
    import ml_dtypes
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _export(
    model: Any, addresses: dict[int, Placed], task: str, out: Path, trust: bool, known: Known | None
) -> dict[str, list[dict[str, Any]]]:
    """Run the exporter, with the one place where it saves a model in our hands; submodel -> its weights.

    Of an empty model `known` are the real values, which explain large constants; None if any constant may stay.
    """
    import openvino as ov
    from optimum.exporters.openvino import convert, utils

    for path in (path for path in out.iterdir() if path.is_dir()):
        shutil.rmtree(path)
    found: dict[str, list[dict[str, Any]]] = {}
    inputs: dict[str, Any] = {}
    misread: dict[str, set[str]] = {}

    def take_inputs(part: Any, config: Any, dummy_inputs: dict[str, Any]) -> Any:
        info = ask_inputs(part, config, dummy_inputs)
        inputs.clear()
        inputs.update(zip((one.name for one in info), utils.flattenize_inputs(dummy_inputs.values()), strict=True))
        return info

    def save(ov_model: Any, path: Any, compress_to_fp16: bool = False) -> None:
        name = Path(path).stem
        (out / name).mkdir()
        _keep_example(ov_model, inputs, out / name / EXAMPLE)
        found[name] = _lift_weights(ov_model, addresses, known, misread)
        ov.save_model(ov_model, out / name / XML, compress_to_fp16=False)

    ask_inputs = convert._get_input_info
    # Preprocessors are ours to write, and torch's check would run the traced model again, to compare placeholder outputs.
    replacements = {
        "save_model": save,
        "save_preprocessors": lambda *_, **__: None,
        "allow_skip_tracing_check": lambda *_: True,
        "_get_input_info": take_inputs,
    }
    with ExitStack() as stack:
        for name, value in replacements.items():
            stack.enter_context(_replaced(convert, name, value))
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        dtypes = {str(parameter.dtype) for parameter in model.parameters()}
        convert.export_from_model(
            model,
            scratch,
            task=task,
            stateful=True,
            trust_remote_code=trust,
            patch_16bit_model=bool(dtypes & {"torch.bfloat16", "torch.float16"}),
        )
        if len(found) > 1:
            # What the runtime of several submodels needs to know, and the checkpoint's own config does not say, the exporter has put there.
            shutil.copyfile(Path(scratch) / CONFIG, out / CONFIG)
    records = [record for weights in found.values() for record in weights]
    used = {tensor for w in records for tensor in (Pieces.from_json(w["matrices"]).tensors if "matrices" in w else [w["tensor"]])}
    lost = sorted({tensor for one in addresses.values() for tensor in one.pieces.tensors} - used)
    if known is not None and (lost or misread):
        whole = {tensor for one in addresses.values() for tensor in one.pieces.tensors if tensor in lost or one.label in misread}
        what = f"an operation that is none with a matrix ({', '.join(misread[min(misread)])}) reads {min(misread)}" if misread else ""
        raise ContractError(what or f"the traced graph does not use {lost[0]}" + (f" and {len(lost) - 1} more" if lost[1:] else ""), whole)
    return found


def _keep_example(ov_model: Any, inputs: dict[str, Any], path: Path) -> None:
    """The inputs that a submodel was traced with, for a run of it that needs some which go together."""
    values = {}
    for port in ov_model.inputs:
        name = port.get_any_name()
        if name in inputs:
            values[name] = inputs[name].detach().cpu().float().numpy().astype(port.get_element_type().to_dtype())
    np.savez(path, **values)


def _lift_weights(ov_model: Any, addresses: dict[int, Placed], known: Known | None, misread: dict[str, set[str]]) -> list[dict[str, Any]]:
    """Turn each constant that is a checkpoint tensor into a Parameter; the graph is complete by now, so nothing folds or merges any more.

    What is read as no matrix stays; `misread` is told by what, under its label.
    """
    from openvino import opset13 as ops

    found: list[dict[str, Any]] = []
    parameters = []
    for node in ov_model.get_ordered_ops():
        if node.get_type_name() != "Constant":
            continue
        address = node.data.ctypes.data
        placed = addresses.get(address)
        if placed is None:
            if known is not None and not known.explains(node) and node.get_byte_size() >= LARGE:
                raise ContractError(f"nothing explains the constant {node.get_friendly_name()} of {node.get_byte_size()} bytes")
            continue
        others = _other_readers(node)
        if others:
            misread[placed.label] = others
            continue
        name = f"{WEIGHT_PREFIX}{len(found)}"
        parameter = ops.parameter(node.get_output_partial_shape(0), node.get_element_type(), name=name)
        found.append({"id": name, "tensor": placed.label, "constant": node.get_friendly_name(), "shape": list(node.get_output_shape(0))})
        if placed.pieces.whole is None:
            found[-1]["matrices"] = placed.pieces.to_json()
        for target in node.output(0).get_target_inputs():
            target.replace_source_output(parameter.output(0))
        _turn_readers(parameter)
        parameters.append(parameter)
    ov_model.add_parameters(parameters)
    return found


def _other_readers(node: Any) -> set[str]:
    """Kinds of the operations that read a weight otherwise than MatMul and Gather read a matrix. One that turns it is looked at when it is lifted."""
    kinds = set()
    for use in node.output(0).get_target_inputs():
        reader = use.get_node()
        kind = reader.get_type_name()
        if kind == "Convert":
            kinds |= _other_readers(reader)
        elif (kind, use.get_index()) not in (("MatMul", 1), ("Gather", 0), ("Transpose", 0), ("ShapeOf", 0)):
            kinds.add(kind)
    return kinds


def _turn_readers(weight: Any) -> None:
    """Let products read the weight itself where they read it with its last two axes exchanged: the exporter leaves that to be computed when saved."""
    for use in weight.output(0).get_target_inputs():
        node = use.get_node()
        order = node.input_value(1).get_node() if node.get_type_name() == "Transpose" else None
        if order is None or order.get_type_name() != "Constant":
            continue
        rank = len(order.data)
        readers = [target.get_node() for target in node.output(0).get_target_inputs()]
        if list(order.data) != [*range(rank - 2), rank - 1, rank - 2] or any(r.get_type_name() != "MatMul" for r in readers):
            continue
        for target in node.output(0).get_target_inputs():
            side = "transpose_b" if target.get_index() else "transpose_a"
            product = target.get_node()
            product.set_attribute(side, not product.get_attributes()[side])
            target.replace_source_output(weight.output(0))


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
