"""What a run uses when it is given no model and no data: real input that every Python already has
on its disk.
"""

import ast
import hashlib
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parent / "tiny-llama"  # see README.md in it for how it was made

# Tests, generated tables and what some distributions leave out: not code that anyone would want to
# imitate.
_LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "ensurepip",
    "turtledemo",
}
_LEFT_OUT |= {"__pycache__", "encodings", "pydoc_data", "_pyrepl"}

# For a model that has no chat template of its own: plain words, and the end-of-text token that
# every model knows ends a turn, so no token has to be added to the vocabulary.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '### Assistant:\n' }}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n\n' }}"
    "{% else %}{{ '### ' + message['role'].capitalize() + ':\n' + message['content'] + '\n\n' }}{% "
    "endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)


def python_files() -> list[Path]:
    """The running interpreter's own standard library source files, sorted: about 13 MB of code."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in root.rglob("*.py") if not _LEFT_OUT.intersection(p.relative_to(root).parts)]
    return sorted(p for p in files if p.stat().st_size)


def sources() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, {"text": source}) of each file of the standard library."""
    for path in python_files():
        try:
            yield str(path), {"text": path.read_text(encoding="utf-8")}
        except UnicodeDecodeError:
            continue


PACKAGES = (
    "asyncio",
    "email",
    "http",
    "importlib",
    "logging",
    "multiprocessing",
    "unittest",
    "xml",
)


def functions_of_packages() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, {"text": the first lines of a function, "label": its package}), equally many of
    each of `PACKAGES`.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found: dict[str, list[tuple[str, str]]] = {name: [] for name in PACKAGES}
    for where, record in sources():
        package = Path(where).relative_to(root).parts[0]
        if package not in found:
            continue
        lines = record["text"].splitlines()
        for node in ast.walk(ast.parse(record["text"])):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and (node.end_lineno or 0) - node.lineno >= 3
            ):
                code = lines[node.lineno - 1 : min(node.end_lineno or 0, node.lineno + 11)]
                found[package].append((f"{where}:{node.lineno}", textwrap.dedent("\n".join(code))))
    count = min(240, *map(len, found.values()))
    for package, functions in found.items():
        for number in range(count):
            where, text = functions[number * len(functions) // count]
            yield where, {"text": text, "label": package}


def docstring_chats() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, {"messages": [...]}) that ask for the docstring of each documented function,
    once if it is there twice.

    The user's turn shows the function without its docstring; the assistant's turn is the
    docstring's first paragraph.
    """
    seen: set[tuple[str, str]] = set()
    for where, record in sources():
        try:
            tree = ast.parse(record["text"])
        except SyntaxError:
            continue
        lines = record["text"].splitlines()
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
            body = node.body[1:]
            if len(docstring) < 15 or not body or body[0].lineno <= (node.body[0].end_lineno or 0):
                continue
            code = (
                lines[node.lineno - 1 : node.body[0].lineno - 1]
                + lines[body[0].lineno - 1 : node.end_lineno]
            )
            asked = textwrap.dedent("\n".join(code))
            if (asked, docstring) not in seen:
                seen.add((asked, docstring))
                turns = [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": docstring},
                ]
                yield f"{where}:{node.lineno}", {"messages": turns}


def docstring_preferences() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (where, {"prompt", "chosen", "rejected"}) that prefer a short function's docstring to
    that of another one.

    Both have about the same length. Half of the functions are asked about, the other half only lend
    their docstrings, each of them once: neither its length nor how often it is seen tells which
    docstring is wrong.
    """
    chats = [(where, *record["messages"]) for where, record in docstring_chats()]
    chats = [chat for chat in chats if len(chat[1]["content"]) <= 400]
    # each docstring once
    by_text = {answer["content"]: number for number, (_, _, answer) in enumerate(chats)}
    order = sorted(by_text, key=lambda text: (len(text), hashlib.sha256(text.encode()).digest()))
    wrong = {by_text[right]: other for right, other in zip(order[::2], order[1::2], strict=False)}
    for number, (where, question, answer) in enumerate(chats):
        if number in wrong:
            rejected = {"role": "assistant", "content": wrong[number]}
            yield where, {"prompt": [question], "chosen": [answer], "rejected": [rejected]}
