"""A section run from site to site, so that its layers are compressed one site after another."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, repeat
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from llmcomp.calibration.experts import Routed
from llmcomp.calibration.runner import PROPERTIES, Runner, Weights, oriented
from llmcomp.calibration.statistics import CrossProducts, SiteStatistics
from llmcomp.graph.sections import HIDDEN, Section
from llmcomp.graph.segments import cut

Values = dict[str, NDArray[Any]]
"""Of a batch, by name."""


class Stream:
    """What one model has computed of a section so far: of each batch, or of the first ones, the values that are still read."""

    def __init__(self, hidden: Sequence[NDArray[np.float32]]) -> None:
        self.batches: list[Values] = [{HIDDEN: x} for x in hidden]


class SegmentedSection:
    """A section and the streams that go through it. Segment k ends in front of site k, so the first is run before anything is observed."""

    def __init__(self, runner: Runner, section: Section) -> None:
        self.runner, self.section, self._segments = runner, section, cut(section)
        self._requests = [
            part.model and ov.Core().compile_model(runner.sections.with_stacks(part.model), "CPU", PROPERTIES).create_infer_request()
            for part in self._segments.parts
        ]

    @property
    def sites(self) -> tuple[tuple[str, ...], ...]:
        """Names of the layers that read each site, in the order of computation."""
        return self._segments.sites

    def has_experts(self, site: int) -> bool:
        """Whether a site is what the section's experts read."""
        return self.section.mixture is not None and self.sites[site] == (self.section.mixture.name,)

    def routed(self, site: int, stream: Stream) -> list[Routed]:
        """Of each batch what the experts read, and who reads what."""
        routing = self._segments.routing
        assert routing is not None
        return [Routed(x, values[routing]) for x, values in zip(self.inputs(site, stream), stream.batches, strict=True)]

    def give(self, stream: Stream, sums: Sequence[NDArray[np.float32]]) -> None:
        """What the experts make of each batch [tokens, out]."""
        mixture = self.section.mixture
        assert mixture is not None
        rank = len(next(port for port in self.section.model.inputs if port.get_any_name() == mixture.name).get_partial_shape())
        for values, total in zip(stream.batches, sums, strict=True):
            values[mixture.name] = self.runner.keep(total.reshape(len(total), *(1,) * (rank - 2), total.shape[-1]))

    def alone(self, site: int) -> list[str]:
        """Layers of a site whose outputs are not added to anything."""
        return [name for name in self.sites[site] if name not in self._segments.parts[site + 1].sums]

    def observe(
        self, weights: Weights, tokens: int, experts: Callable[[Sequence[Routed]], Sequence[NDArray[np.float32]]]
    ) -> dict[str, NDArray[np.float32]]:
        """H [in, in] of each layer that reads a site with these weights in the section, from the first batches that hold so many tokens, or as
        many as the widest site has inputs. `experts` gives what those of the section make of what they read."""
        found: dict[str, NDArray[np.float32]] = {}
        sites = [k for k in range(len(self.sites)) if not self.has_experts(k)]
        wanted = max([tokens, *(weights[self.sites[k][0]].shape[-1] for k in sites)])
        held = list(accumulate(batch.size for batch in self.runner.batches))
        stream = Stream(self.runner.hidden[: bisect_left(held, wanted) + 1])
        for segment, names in enumerate(self.sites):
            self.advance(segment, stream, weights)
            if self.has_experts(segment):
                self.give(stream, experts(self.routed(segment, stream)))
                continue
            found |= dict.fromkeys(names, self.moments(segment, stream))
        return found

    def advance(self, segment: int, stream: Stream, weights: Weights) -> None:
        """Run a segment with these weights."""
        for place, outputs in enumerate(self._outputs(segment, stream, weights)):
            self._replace(segment, stream.batches[place], outputs)

    def inputs(self, site: int, stream: Stream) -> list[NDArray[np.float32]]:
        """Of each batch what a site reads [tokens, in]."""
        return [_flat(values[self._segments.inputs[site]]) for values in stream.batches]

    def moments(self, site: int, stream: Stream) -> NDArray[np.float32]:
        """H [in, in] of a site."""
        inputs = self.inputs(site, stream)
        statistics = SiteStatistics.empty(inputs[0].shape[-1])
        for x in inputs:
            statistics.add_products(x, self.runner.threads)
        return statistics.take_second_moment()

    def drift(self, site: int, floats: Stream, stream: Stream) -> NDArray[np.float32]:
        """[in, in]: mean of (x - x^) x^T, x^ what a site reads in `stream`, x what it reads in `floats`."""
        products = CrossProducts(self.runner.threads)
        for x, given in zip(self.inputs(site, floats), self.inputs(site, stream), strict=True):
            products.add(x - given, given)
        return products.mean()

    def advance_floats(self, segment: int, floats: Stream, stream: Stream, weights: Weights) -> dict[str, NDArray[np.float32]]:
        """Run a segment with the float weights; returns for each layer in front of it whose output is added to a value, [out, in]: the mean
        of (v - v^) x^T, v^ that sum in `stream`, which stays where it is, v the one in `floats`, and x^ what the layer reads in `stream`."""
        part = self._segments.parts[segment]
        found = {layer: CrossProducts(self.runner.threads) for layer in part.sums}
        shadow = self._outputs(segment, stream, weights) if found else repeat({})
        # The two take turns: what the one gives is copied before the other is asked.
        for place, outputs in enumerate(self._outputs(segment, floats, weights)):
            sums = {layer: outputs[name].copy() for layer, name in part.sums.items()}
            self._replace(segment, floats.batches[place], outputs)
            own = next(shadow)
            for layer, name in part.sums.items():
                given = _flat(stream.batches[place][self._segments.inputs[segment - 1]])
                found[layer].add(_flat(sums[layer]) - _flat(own[name]), given)
        return {layer: products.mean() for layer, products in found.items()}

    def out(self, stream: Stream) -> list[NDArray[np.float32]]:
        """The outgoing hidden states."""
        assert self._segments.out is not None
        return [values[self._segments.out].reshape(x.shape) for values, x in zip(stream.batches, self.runner.hidden, strict=True)]

    def _outputs(self, segment: int, stream: Stream, weights: Weights) -> Iterator[Values]:
        """Of each batch what a segment gives, good until the next is asked for, or until another stream's."""
        request, part = self._requests[segment], self._segments.parts[segment]
        if request is None:
            yield from ({} for _ in stream.batches)
            return
        wanted = {port.get_any_name() for port in request.model_inputs}
        given = {name: w for name, w in oriented(self.section.layers, weights).items() if name in wanted}
        for batch, values in zip(self.runner.batches, stream.batches, strict=False):
            ambient = self.runner.ambient((batch.shape[0], batch.shape[1]))
            feed: dict[str, Any] = {name: ambient[name] for name in self.section.ambient if name in wanted}
            feed |= {name: self._shaped(values[name]) if name == HIDDEN else values[name] for name in part.takes}
            request.infer({**feed, **given}, share_inputs=True)
            yield {name: request.get_output_tensor(i).data for i, name in enumerate(part.gives)}

    def _shaped(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """As the section reads it: opt's blocks take [rows times length, channels]."""
        flat = len(self.section.model.input(HIDDEN).get_partial_shape()) == 2
        return np.ascontiguousarray(_flat(hidden) if flat else hidden)

    def _replace(self, segment: int, values: Values, outputs: Values) -> None:
        """Take what a segment gives, and forget what nothing behind it reads."""
        part = self._segments.parts[segment]
        for name, array in outputs.items():
            if name not in part.last_read:
                values[name] = self.runner.keep(array)
        for name in part.last_read:
            values.pop(name, None)


def _flat(x: NDArray[Any]) -> NDArray[Any]:
    return x.reshape(-1, x.shape[-1])
