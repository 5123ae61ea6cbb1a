"""The embedded default: scikit-learn's handwritten digits as files."""

from pathlib import Path

import numpy as np
from PIL import Image


def write_digits(folder: Path) -> None:
    """Write scikit-learn's 1,797 handwritten digits as `folder/<digit>/<number>.png`, 8 x 8 pixels,
    16 shades of grey.

    E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
    Repository, 1998.
    """
    from sklearn.datasets import load_digits

    data = load_digits()
    for number, (pixels, label) in enumerate(zip(data.images, data.target, strict=True)):
        file = folder / str(label) / f"{number:04d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(file)
