# A badge: two words in a picture of SVG, for a README; no script, no font from elsewhere.

from __future__ import annotations

from servanda.report.format import xml_document

_LETTER, _PAD, _HEIGHT = 6.6, 7, 20  # pixels
_GREY = "#444c56"
_COLOURS = {
    "bitwise equal": "#1a7f37",
    "agrees to float32 rounding": "#1a7f37",
    "agrees to bf16 rounding": "#2b7489",
    "agrees to fp8 rounding": "#8a5a00",
    "disagrees": "#b62324",
}


def badge(label: str, words: str) -> str:
    """The SVG of a badge.

    Args:
        label: left part; words: right part, whose colour is that of the class, if it is one.
    """
    from xml.etree.ElementTree import Element, SubElement  # no other report of `tools` needs it

    left, right = (round(_LETTER * len(text)) + 2 * _PAD for text in (label, words))
    title = f"{label}: {words}"
    size = {"width": f"{left + right}", "height": f"{_HEIGHT}"}
    named = {"xmlns": "http://www.w3.org/2000/svg", "role": "img", "aria-label": title}
    root = Element("svg", {**named, **size})
    SubElement(root, "title").text = title
    colour = _COLOURS.get(words, _GREY)
    font = {"font-family": "Verdana,DejaVu Sans,sans-serif", "font-size": "11", "fill": "#fff"}
    for text, x, width, fill in ((label, 0, left, _GREY), (words, left, right, colour)):
        box = {"x": f"{x}", "width": f"{width}", "height": f"{_HEIGHT}", "fill": fill}
        SubElement(root, "rect", box)
        place = {"x": f"{x + _PAD}", "y": "14", "textLength": f"{width - 2 * _PAD}"}
        SubElement(root, "text", {**font, **place}).text = text
    return xml_document(root)
