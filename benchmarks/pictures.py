"""For benchmarks: JPEGs that cost as much to decode as photographs and whose class can be learned; a ResNet-18."""

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from about import cores
from PIL import Image

CLASSES = 10


def make_images(folder: Path, images: int, image_size: int) -> None:
    """JPEGs in images/train/<class>/, one or two of each class in images/validation/: 1.6 to 2.5 times `image_size` wide.

    Noise with a natural image's spectrum, about 1/f, and the class in its colour and in the number of its stripes.
    """

    def make(number: int) -> None:
        rng, label = np.random.default_rng([0, number]), number % CLASSES
        width, height = rng.integers(round(1.6 * image_size), round(2.5 * image_size), 2).tolist()
        pixels = 128 + 40 * np.cos(2 * np.pi * (label / CLASSES + np.arange(3) / 3)) + rng.normal(0, 5, (height, width, 3))
        pixels += 20 * np.sin(2 * np.pi * ((3 + label) * np.arange(height) / height + rng.random()))[:, None, None]
        for octave in range(6):
            cells = Image.fromarray(rng.integers(0, 256, (3 << octave, 3 << octave, 3), dtype=np.uint8))
            smooth = np.asarray(cells.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
            pixels += (smooth - 128) * 0.6 / 2**octave
        place = folder / "images" / ("train" if number < images else "validation") / f"class-{label}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{number:06}.jpg", quality=90)

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(make, range(math.ceil(images / CLASSES) * CLASSES + CLASSES)))


def make_resnet_18(folder: Path) -> Path:
    """The folder, with the config.json of a ResNet-18."""
    from transformers import ResNetConfig

    sizes = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    ResNetConfig(**sizes, layer_type="basic").save_pretrained(folder)  # type: ignore[arg-type]
    return folder
