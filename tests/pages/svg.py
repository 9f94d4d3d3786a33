"""An SVG read back."""

from __future__ import annotations

import re
from xml.etree import ElementTree

SPACE = "{http://www.w3.org/2000/svg}"


def texts(svg: str) -> list[str]:
    return [(element.text or "").strip() for element in ElementTree.fromstring(svg).iter(f"{SPACE}text")]


def marks(svg: str, color: str) -> list[tuple[float, float]]:
    """Places (x, y) of marks filled with a colour, those of the legend too."""
    uses = ElementTree.fromstring(svg).iter(f"{SPACE}use")
    return [(float(u.attrib["x"]), float(u.attrib["y"])) for u in uses if f"fill: {color}" in u.attrib.get("style", "")]


def widths(svg: str, color: str) -> list[float]:
    """Of shapes filled with a colour."""
    paths = ElementTree.fromstring(svg).iter(f"{SPACE}path")
    found = [re.findall(r"[ML] (\S+)", p.attrib["d"]) for p in paths if f"fill: {color}" in p.attrib.get("style", "")]
    return [max(map(float, xs)) - min(map(float, xs)) for xs in found]


def dashes(svg: str, color: str) -> int:
    """Dashed lines of a colour."""
    paths = ElementTree.fromstring(svg).iter(f"{SPACE}path")
    styles = [p.attrib.get("style", "") for p in paths]
    return sum("stroke-dasharray" in style and f"stroke: {color}" in style for style in styles)


def names(svg: str) -> list[str]:
    return [e.attrib["id"] for e in ElementTree.fromstring(svg).iter() if "id" in e.attrib]


def references(svg: str) -> set[str]:
    """Names that the SVG refers to."""
    attributes = [(key, value) for e in ElementTree.fromstring(svg).iter() for key, value in e.attrib.items()]
    links = {value.removeprefix("#") for key, value in attributes if key.endswith("href")}
    return links | {found for _, value in attributes for found in re.findall(r"url\(#([^)]+)\)", value)}
