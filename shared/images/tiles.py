"""A picture of several images, each below a text."""

import math
from pathlib import Path

from PIL import Image

ACROSS = 4


def draw_tiles(file: Path, title: str, tiles: list[tuple[Image.Image, str]]) -> None:
    """Draw images, which are made smaller, with a text above each."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(tiles) / ACROSS)
    figure = Figure(figsize=(3.2 * ACROSS, 3.8 * rows + 0.5), layout="constrained")
    figure.suptitle(title)
    for place, (image, text) in enumerate(tiles, 1):
        image.thumbnail((320, 320))
        axes = figure.add_subplot(rows, ACROSS, place, xticks=[], yticks=[])
        axes.set_title(text, fontsize=8)
        axes.imshow(image)
    figure.savefig(file, dpi=110)
