"""The weights of a torch model that can be pruned or quantized, by name, each once however many modules share it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from llmcomp.errors import NonFiniteWeightError, RuleError
from llmcomp.options import IgnoredScope
from llmcomp.training.feeding import feed

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
KINDS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED, nn.Embedding)
PRODUCTS = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.bmm, torch.mm}
PARAMETER = "Parameter"
"""Operation type of a bare parameter, where an ignored scope's rule asks for types."""


@dataclass(frozen=True)
class Weight:
    """A parameter with the modules that own it: several where it is tied. `name` is that of the first, `kind` its class."""

    name: str
    kind: str
    owners: tuple[tuple[nn.Module, str], ...]

    @property
    def original(self) -> nn.Parameter:
        """The parameter itself, below whatever masks or rounds it."""
        return original(*self.owners[0])

    def add(self, parametrization: nn.Module) -> None:
        """Every owner reads the parameter through this module from now on, on top of what it reads it through already."""
        parametrization.train(self.owners[0][0].training)
        for module, attribute in self.owners:
            parametrize.register_parametrization(module, attribute, parametrization)

    def find(self, kind: type | tuple[type, ...]) -> Any:
        """The first module of this kind that the weight is read through; None without one."""
        module, attribute = self.owners[0]
        if not parametrize.is_parametrized(module, attribute):
            return None
        return next((part for part in module.parametrizations[attribute] if isinstance(part, kind)), None)


def original(module: nn.Module, attribute: str) -> nn.Parameter:
    """A module's own parameter, below its parametrizations."""
    return module.parametrizations[attribute].original if parametrize.is_parametrized(module, attribute) else getattr(module, attribute)


def find_weights(model: nn.Module, example_inputs: Any = None) -> list[Weight]:
    """Weights of linear layers, convolutions, transposed ones and embeddings, in the model's order; with example inputs also bare parameters that
    a run of the model multiplies as matrices. A convolution's or a recurrent cell's bias is none, nor are recurrent cells' and packed attention's matrices.
    """
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, KINDS):
            owners.setdefault(id(original(module, "weight")), []).append((join(name, "weight"), module, "weight"))
    if example_inputs is not None:
        multiplied = run_and_note(model, example_inputs)
        for name, module in model.named_modules():
            for attribute, parameter in module.named_parameters(recurse=False):
                if id(parameter) in multiplied and id(parameter) not in owners and ".parametrizations." not in f".{name}.":
                    owners[id(parameter)] = [(join(name, attribute), module, attribute)]
    found = []
    for entries in owners.values():
        name, module, attribute = entries[0]
        kind = parametrize.type_before_parametrizations(module).__name__ if isinstance(module, KINDS) else PARAMETER
        # A module that is registered twice under two names is one owner.
        found.append(Weight(name, kind, tuple({id(m): (m, a) for _, m, a in entries}.values())))
    return found


def join(module: str, attribute: str) -> str:
    return f"{module}.{attribute}" if module else attribute


def run_and_note(model: nn.Module, example_inputs: Any) -> set[int]:
    """Ids of the parameters that are an operand of a matrix product in a run."""
    seen: set[int] = set()

    class Watch(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in PRODUCTS:
                seen.update(id(x) for x in args if isinstance(x, nn.Parameter) and x.ndim >= 2)
            return function(*args, **(kwargs or {}))

    with Watch(), evaluating(model), torch.no_grad():
        feed(model, example_inputs)
    return seen


class evaluating:
    """A model in evaluation mode for a while; afterwards every module is again in the mode that it was in."""

    def __init__(self, model: nn.Module) -> None:
        self.modes = [(module, module.training) for module in model.modules()]
        self.model = model

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *error: object) -> None:
        for module, mode in self.modes:
            module.training = mode


def kept(weights: list[Weight], scope: IgnoredScope | None) -> list[Weight]:
    """Those that no rule of the ignored scope names: by the weight's name, its module's, or the module's class as type.

    Raises:
        RuleError: a rule that names no weight although the scope is validated; or no weight is left.
    """
    ignored: set[str] = set()
    scope = scope or IgnoredScope()
    kinds = sorted({weight.kind for weight in weights})
    for rule in scope.rules():
        found = {weight.name for weight in weights if rule.matches(names(weight), (weight.kind,))}
        if not found and scope.validate:
            near = rule.near([name for weight in weights for name in names(weight)], kinds)
            hint = f"Did you mean {' or '.join(near)}?" if near else "Name a module, its weight, or its class as type:CLASS"
            raise RuleError(f"ignored scope '{rule.text}'", "it matches no weight", hint)
        ignored |= found
    left = [weight for weight in weights if weight.name not in ignored]
    if not left:
        reason = "its rules together match every weight" if weights else "the model has no linear, convolution or embedding weight"
        raise RuleError("ignored scope" if weights else "model", reason, "Narrow the rules" if weights else "Give a model with such layers")
    return left


def names(weight: Weight) -> tuple[str, str]:
    return weight.name, weight.name.rpartition(".")[0]


def check_finite(weights: Iterable[Weight]) -> None:
    """
    Raises:
        NonFiniteWeightError: NaN or Inf in one of them.
    """
    for weight in weights:
        if not torch.isfinite(weight.original).all():
            raise NonFiniteWeightError(
                f"weight {weight.name}", "it holds NaN or Inf", "Mend the checkpoint, or put it into the ignored scope"
            )


def parametrizations(model: nn.Module, kind: type | tuple[type, ...]) -> Iterator[tuple[Weight, Any]]:
    """Every weight that is read through a module of this kind, with that module; tied weights once."""
    owners: dict[int, list[tuple[str, nn.Module, str]]] = {}
    for name, module in model.named_modules():
        if parametrize.is_parametrized(module):
            for attribute, parts in module.parametrizations.items():
                if any(isinstance(part, kind) for part in parts):
                    owners.setdefault(id(parts.original), []).append((join(name, attribute), module, attribute))
    for entries in owners.values():
        name, module, attribute = entries[0]
        weight = Weight(name, parametrize.type_before_parametrizations(module).__name__, tuple((m, a) for _, m, a in entries))
        yield weight, weight.find(kind)
