"""Draw docs/pictures/console.txt, lines that real runs printed, as a console for light and dark
pages: `python docs/site/console.py`.

The file's first lines say how to make it again. A line of "..." stands for lines left out.
"""

import re
from html import escape
from pathlib import Path

from pictures import DARK, LIGHT, OUT, Theme

WIDTH = 110  # columns
HEIGHT = 19  # pixels a line
COLOURS = (  # the first pattern that a line matches decides
    (r"\$ ", "text", "font-weight='bold'"),
    (r"error:|killed by", "second", "font-weight='bold'"),
    (r" *\.\.\.$", "faint", ""),
    ("", "text", ""),
)


def spans(line: str, learned: bool, theme: Theme) -> str:
    """One line as SVG; learned: between the brackets, in the colour of what is right."""
    _, colour, style = next(row for row in COLOURS if re.match(row[0], line))
    if learned:
        colour, style = "right", "font-weight='bold'"
    return f"<tspan fill='{getattr(theme, colour)}' {style}>{escape(line)}</tspan>"


def draw(lines: list[str], theme: Theme) -> str:
    box = "#f6f8fa" if theme is LIGHT else "#161b22"
    height = HEIGHT * len(lines) + 26
    font = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
    rows, learned = [], False
    for number, line in enumerate(lines):
        learned = learned or line.startswith("  ⟦")
        y = HEIGHT * number + 28
        text = spans(line, learned, theme)
        rows.append(f"<text x='16' y='{y}' xml:space='preserve'>{text}</text>")
        learned = learned and "⟧" not in line
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 900 {height}' "
        f'font-family="{font}" font-size="13">\n'
        f"<rect width='900' height='{height}' rx='8' fill='{box}' stroke='{theme.faint}' "
        f"stroke-opacity='0.4'/>\n" + "\n".join(rows) + "\n</svg>\n"
    )


if __name__ == "__main__":
    text = Path(OUT / "console.txt").read_text(encoding="utf-8")
    shown = [line for line in text.splitlines() if not line.startswith("#!")]
    assert max(map(len, shown)) <= WIDTH, "too wide for the picture"
    for theme in (LIGHT, DARK):
        (OUT / f"console-{theme.name}.svg").write_text(draw(shown, theme), encoding="utf-8")
