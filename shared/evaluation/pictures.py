"""The confusion matrix, and names of classes for pictures."""

from pathlib import Path

import numpy as np

from shared.process.printing import print_main

MOST = 40  # classes in a picture, at most


def draw_confusion_matrix(
    file: Path,
    title: str,
    names: list[str],
    labels: np.ndarray,
    predicted: np.ndarray,
) -> None:
    """Draw the classes with the most mistakes.

    Args:
        names: what to call the classes.
        labels, predicted: class numbers, [samples].
    """
    from matplotlib.figure import Figure
    from sklearn.metrics import ConfusionMatrixDisplay

    wrong = labels != predicted
    mistakes = np.bincount(np.append(labels[wrong], predicted[wrong]), minlength=len(names))
    shown = np.sort(np.argsort(-mistakes, kind="stable")[:MOST])
    title = title.replace("$", r"\$")  # else a formula
    title += f"\nshares of the true class; {len(shown)} of {len(names)} classes"
    side = 2.5 + 0.45 * len(shown)
    figure = Figure(figsize=(side, side), layout="constrained")
    ConfusionMatrixDisplay.from_predictions(
        labels,
        predicted,
        labels=shown,
        display_labels=[names[number] for number in shown],
        normalize="true",
        values_format=".0%",
        xticks_rotation="vertical",
        cmap="Blues",
        ax=figure.add_subplot(title=title),
        colorbar=False,
    )
    figure.savefig(file, dpi=110)


def picture_names(classes: tuple[str, ...]) -> dict[str, str]:
    """What pictures call each class: "class 3" where no font here has the characters.

    Sets the fonts to draw with.
    """
    from matplotlib import font_manager, rcParams

    names = {name: _short(name) for name in classes}
    missing = {character for character in "".join(names.values()) if not character.isascii()}
    fonts = ["DejaVu Sans"]  # matplotlib's own, which is in each installation
    for font in font_manager.fontManager.ttflist:
        if missing and "Last Resort" not in font.name:  # which has boxes only
            found = missing & set(map(chr, font_manager.get_font(font.fname).get_charmap()))
            missing -= found
            fonts += [font.name] * bool(found)
    rcParams["font.family"] = fonts
    if missing:
        print_main("some classes have no font here, so pictures number them (try fonts-noto-cjk)")
    for number, name in enumerate(classes):
        if missing & set(names[name]):
            names[name] = f"class {number}"
    return names


def _short(name: str) -> str:
    """At most 18 characters, without bytes that are not Unicode and $ (a formula in matplotlib)."""
    name = name.encode("utf-8", "backslashreplace").decode()
    return (name if len(name) <= 18 else name[:17] + "…").replace("$", r"\$")
