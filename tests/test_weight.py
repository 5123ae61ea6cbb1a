"""How much code a reader takes over, in tokens: names, numbers, strings, operators and keywords, no comments or docstrings.

A limit may rise only with a reason beside it. Tokens, unlike lines, do not shrink when lines get longer.
"""

import ast
import functools
import io
import tokenize
from pathlib import Path

import pytest

from tests.conftest import ROOT, imports_of
from tools import extras as extras_of
from tools import new

# To the next hundred. 2026-11-29: what few runs need went into extras, the loaders and evaluations of templates came here;
# optimizers of frozen weights, late values and tensors are refused, notes are compared (200).
FOLDERS = {
    "answers": 2_800,
    "commands": 5_100,
    "config": 3_600,
    "data": 13_500,
    "demo": 1_000,
    "evaluation": 4_000,
    "images": 7_200,
    "models": 22_300,
    "parallel": 3_700,
    "process": 3_700,
    "rollouts": 3_500,
    "run": 18_700,
    "text": 20_500,
    "training": 3_200,
}
# A copy of a template, without what it can do without: see tools/new.py. With 2026-11-29's extras (23,300) elsewhere.
TEMPLATES = {
    "dpo": 83_800,
    "full_finetune": 76_300,
    "grpo": 81_000,
    "image_classification": 62_600,
    "lora_finetune": 79_700,
    "pretrain": 68_800,
    "pretrain_pipeline": 66_600,
    "text_classification": 71_600,
}
# What few runs need, each imported by the function that asks.
EXTRAS = {
    "averages": 300,
    "deepspeed": 1_000,
    "experts": 2_500,
    "mixture": 1_100,
    "optimizers": 1_800,
    "pipeline": 1_700,
    "rehearsal": 500,
    "remote": 1_200,
    "replicas": 1_600,
    "sequence": 1_900,
    "streaming": 3_000,
    "tars": 1_200,
    "tensor": 700,
    "vision": 5_700,
}
CORE = 112_800
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


@functools.cache
def weight(path: Path) -> int:
    """Tokens of a file without its docstrings."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                docstrings |= {*range(first.lineno, (first.end_lineno or first.lineno) + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(t.type not in LAYOUT and not (t.type == tokenize.STRING and t.start[0] in docstrings) for t in tokens)


def parts_of(extra: str) -> list[Path]:
    return [*(ROOT / "shared/extras" / extra).glob("*.py")] or [ROOT / f"shared/extras/{extra}.py"]


def test_every_folder_template_and_extra_has_a_limit():
    folders = {path.name for path in (ROOT / "shared").iterdir() if any(path.glob("*.py"))}
    assert folders == FOLDERS.keys() | {"extras"}
    assert {path.stem for path in (ROOT / "templates").glob("*.py")} == TEMPLATES.keys()
    assert EXTRAS.keys() == extras_of.EXTRAS.keys()
    assert sum(FOLDERS.values()) <= CORE


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_weighs_no_more(folder):
    assert sum(map(weight, (ROOT / "shared" / folder).rglob("*.py"))) <= FOLDERS[folder]


@pytest.mark.parametrize("extra", EXTRAS)
def test_an_extra_weighs_no_more(extra):
    assert 0 < sum(map(weight, parts_of(extra))) <= EXTRAS[extra]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_copy_of_a_template_weighs_no_more(template, monkeypatch):
    monkeypatch.setattr(new, "imports", imports_of)
    files, _ = new.closure([ROOT / "templates" / f"{template}.py"], extras_of.chosen((template,), ()))
    assert sum(map(weight, files)) <= TEMPLATES[template]
