"""A hook of mkdocs: pages from outside docs/, and links that lead to source files."""

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {  # page of the site: file of the repository
    "index.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
    "security.md": "SECURITY.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
PAGES = {file: page for page, file in ELSEWHERE.items()}


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for page, file in ELSEWHERE.items():
        files.append(
            File.generated(config, page, content=(ROOT / file).read_text(encoding="utf-8"))
        )
    for file in (*ROOT.glob("benchmarks/*.png"), ROOT / "docs/site/extra.css"):
        files.append(File.generated(config, file.name, abs_src_path=str(file)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Links to files of the repository: to their page of the site, or to the source."""
    name = page.file.src_uri
    folder = PurePosixPath(ELSEWHERE.get(name, f"docs/{name}")).parent

    def link(match: re.Match) -> str:
        path, hash_sign, anchor = match[1].partition("#")
        if not path or "://" in path or path.startswith("mailto:"):
            return match[0]
        file = normpath((folder / path).as_posix())
        if file in PAGES or file.startswith("docs/"):
            target = PAGES.get(file) or file.removeprefix("docs/")
            start = PurePosixPath(name).parent.as_posix() or "."
            return f"]({relpath(target, start)}{hash_sign}{anchor})"
        if not (ROOT / file).exists():
            return match[0]  # which --strict reports
        if file.endswith(".png"):
            return f"]({PurePosixPath(file).name})"
        return f"]({(config.repo_url or 'https://github.com').rstrip('/')}/blob/main/{file})"

    # badges, which are of other hosts
    markdown = re.sub(r"^\[!\[tests\].*\n", "", markdown, flags=re.MULTILINE)
    # hidden from readers of the file, docstrings on the site
    markdown = re.sub(r"<!-- (::: [\w.]+) -->", r"\1", markdown)
    # pictures for light and dark pages: HTML, whose links mkdocs leaves as they are, and a page is a folder
    up = "../" * page.url.count("/")
    markdown = re.sub(r'((?:srcset|src)=")(?:docs/)?(?=pictures/)', rf"\1{up}", markdown)
    return re.sub(r"\]\(([^)\s]+)\)", link, markdown)
