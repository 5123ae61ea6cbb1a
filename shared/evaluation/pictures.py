"""Names of classes for pictures."""

from functools import cache

from shared.process.printing import print_main

MOST = 40  # classes in a picture, at most


@cache
def picture_names(classes: tuple[str, ...]) -> list[str]:
    """Names of classes for a picture, and the fonts to draw them; "class 3" where no font here has the characters."""
    from matplotlib import font_manager, rcParams

    names = [_short(name) for name in classes]
    missing = {character for name in names for character in name if not character.isascii()}
    fonts = ["DejaVu Sans"]  # matplotlib's own, which is in each installation
    installed = (font for font in font_manager.fontManager.ttflist if "Last Resort" not in font.name)  # it has boxes only
    for font in sorted(installed, key=lambda font: font.name not in fonts):
        if not missing:
            break
        has = missing & set(map(chr, font_manager.get_font(font.fname).get_charmap()))
        fonts += [font.name] * bool(has)
        missing -= has
    rcParams["font.family"] = fonts
    if missing:
        hidden = [f"{number} = {name}" for number, name in enumerate(names) if missing & set(name)]
        shown = ", ".join(hidden[:20]) + ", ..." * (len(hidden) > 20)
        print_main(f"no font here can write some classes (fonts-noto-cjk may); pictures number them: {shown}")
    return [f"class {number}" if missing & set(name) else name for number, name in enumerate(names)]


def _short(name: str) -> str:
    """At most 18 characters, without $ (it starts a formula in matplotlib) and without bytes that are not Unicode."""
    name = name.encode("utf-8", "backslashreplace").decode()
    return (name if len(name) <= 18 else name[:17] + "…").replace("$", r"\$")
