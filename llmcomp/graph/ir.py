"""An OpenVINO IR file as layers and edges, without its weights: read, walk, rewire, write.

Layers are found by id, never by name: names repeat. Nothing here needs the runtime, so a graph of any size costs its XML only.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path


class IR:
    """The XML of an IR. `layers` maps id -> element in the file's (topological) order; `inputs[id][port]` is the (id, port) that feeds it."""

    def __init__(self, root: ET.Element) -> None:
        self.root = root
        layers, edges = root.find("layers"), root.find("edges")
        if layers is None or edges is None:
            raise ValueError("not an OpenVINO IR: no <layers> or no <edges>")
        self._layers_element, self._edges_element = layers, edges
        self.layers: dict[int, ET.Element] = {int(e.attrib["id"]): e for e in layers}
        self.inputs: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        self._readers: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for e in edges:
            source = (int(e.attrib["from-layer"]), int(e.attrib["from-port"]))
            target = (int(e.attrib["to-layer"]), int(e.attrib["to-port"]))
            self.inputs[target[0]][target[1]] = source
            self._readers[source[0]][source[1]].append(target)
        self._next = max(self.layers, default=-1) + 1
        self._in_bodies = [e for body in layers.iterfind("layer/body") for e in body.iter("layer") if e.attrib["type"] == "Const"]

    @classmethod
    def read(cls, path: Path) -> IR:
        return cls(ET.parse(path).getroot())

    def kind(self, layer: int) -> str:
        return self.layers[layer].attrib["type"]

    def name(self, layer: int) -> str:
        return self.layers[layer].attrib.get("name", "")

    def data(self, layer: int) -> dict[str, str]:
        """The attributes of a layer's <data>, or of a constant's in a body."""
        element = (self.layers[layer] if layer >= 0 else self._in_bodies[-1 - layer]).find("data")
        return element.attrib if element is not None else {}

    def output_shape(self, layer: int) -> tuple[int, ...]:
        """Dimensions of the first output; -1 where dynamic."""
        return tuple(int(d.text or -1) for d in self.layers[layer].iterfind("output/port[1]/dim"))

    def output_type(self, layer: int) -> str:
        port = self.layers[layer].find("output/port")
        return port.attrib.get("precision", "") if port is not None else ""

    def readers(self, layer: int, port: int | None = None) -> list[tuple[int, int]]:
        """(layer, port) of everything that reads an output of `layer`."""
        ports = self._readers[layer]
        return list(ports[port]) if port is not None else [target for targets in ports.values() for target in targets]

    def constants(self) -> Iterator[int]:
        return (i for i, e in self.layers.items() if e.attrib["type"] == "Const")

    def body_constants(self) -> Iterator[int]:
        """Numbers below zero for the constants in bodies of loops, which have ids of their own there; for `data` alone."""
        return iter(range(-1, -1 - len(self._in_bodies), -1))

    def new_id(self) -> int:
        self._next += 1
        return self._next - 1

    def add(self, element: ET.Element, before: int, inputs: dict[int, tuple[int, int]]) -> int:
        """Insert a layer in front of layer `before` (order is topological) and connect its inputs."""
        number = int(element.attrib["id"])
        position = list(self._layers_element).index(self.layers[before])
        self._layers_element.insert(position, element)
        self.layers[number] = element
        for port, source in inputs.items():
            self.connect(source, (number, port))
        return number

    def connect(self, source: tuple[int, int], target: tuple[int, int]) -> None:
        """Make `source` the one that feeds `target`."""
        old = self.inputs[target[0]].get(target[1])
        if old is not None:
            self._readers[old[0]][old[1]].remove(target)
        self.inputs[target[0]][target[1]] = source
        self._readers[source[0]][source[1]].append(target)

    def remove(self, layer: int) -> None:
        """Take out a layer that nobody reads any more."""
        if self.readers(layer):
            raise ValueError(f"layer {layer} ({self.name(layer)}) is still read")
        for port, source in self.inputs.pop(layer, {}).items():
            self._readers[source[0]][source[1]].remove((layer, port))
        self._layers_element.remove(self.layers.pop(layer))

    def write(self, path: Path) -> None:
        """Write the XML with the edges as they are now."""
        self._edges_element.clear()
        for target in self.layers:
            for port, (source, source_port) in sorted(self.inputs.get(target, {}).items()):
                ET.SubElement(
                    self._edges_element,
                    "edge",
                    {"from-layer": str(source), "from-port": str(source_port), "to-layer": str(target), "to-port": str(port)},
                )
        ET.indent(self.root, "\t")
        ET.ElementTree(self.root).write(path, encoding="utf-8", xml_declaration=True)
