"""Pictures inside of a page: each as SVG for light and dark screens, and where it matters for wide and narrow ones."""

from __future__ import annotations

import base64
import colorsys
import io
import re
from collections.abc import Callable, Sequence
from typing import IO

from markupsafe import Markup

#: Width of a screen in CSS pixels up to which it counts as narrow.
NARROW = 640
#: What is put in here is escaped.
_SOURCE = Markup('<source media="{}" srcset="{}">')
_PICTURE = Markup('<picture>{}<img alt="{}" src="{}"></picture>')
#: A colour is grey if the largest and the smallest of its red, green and blue differ by less than this, of 1.
_GREY = 0.08
#: Least lightness of a colour on a dark page, 0 to 1.
_LEAST_LIGHTNESS = 0.66
#: Most saturation of a colour that was made lighter: more would glow.
_MOST_SATURATION = 0.7
#: Lightness of the dark page, and of its brightest text, 0 to 1.
_DARKEST, _BRIGHTEST = 0.09, 0.92


def picture(saves: Sequence[Callable[[IO[bytes]], None]], alternative: str) -> Markup:
    """An element that shows a picture as an image of its own, so that its names and styles reach no other picture.

    Args:
        saves: each writes an SVG: the one for wide screens, and perhaps one for narrow screens.
        alternative: what the picture shows, in words.
    """
    wide, *narrow = (svg(save) for save in saves)
    sources = [
        *((f"(prefers-color-scheme: dark) and (max-width: {NARROW}px)", dark(one)) for one in narrow),
        *((f"(max-width: {NARROW}px)", one) for one in narrow),
        ("(prefers-color-scheme: dark)", dark(wide)),
    ]
    inside = Markup().join(_SOURCE.format(media, _address(one)) for media, one in sources)
    return _PICTURE.format(inside, alternative, _address(wide))


def svg(save: Callable[[IO[bytes]], None]) -> str:
    """What ``save`` writes to an open file."""
    to = io.BytesIO()
    save(to)
    return to.getvalue().decode()


def dark(light: str) -> str:
    """An SVG with the same picture for a dark page: greys are turned round, and other colours become lighter."""
    # Matplotlib leaves black out.
    light = light.replace("<svg ", '<svg fill="#000000" ', 1)
    return re.sub(r"#[0-9a-fA-F]{6}\b", lambda match: on_dark(match[0]), light)


def on_dark(colour: str) -> str:
    """A colour that is as easy to see on a dark page as ``colour``, ``#rrggbb``, is on a white page."""
    red, green, blue = (int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5))
    if max(red, green, blue) - min(red, green, blue) < _GREY:
        grey = _BRIGHTEST - (_BRIGHTEST - _DARKEST) * (red + green + blue) / 3
        return "#" + f"{round(255 * grey):02x}" * 3
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    if lightness < _LEAST_LIGHTNESS:
        lightness, saturation = _LEAST_LIGHTNESS, min(saturation, _MOST_SATURATION)
    lighter = colorsys.hls_to_rgb(hue, lightness, saturation)
    return "#" + "".join(f"{round(255 * part):02x}" for part in lighter)


def _address(image: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(image.encode()).decode()}"
