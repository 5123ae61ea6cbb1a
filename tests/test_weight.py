"""How much code a reader takes over, in tokens: names, numbers, strings, operators and keywords, no comments or docstrings.

A limit may rise only with a reason in the commit. Tokens, unlike lines, do not shrink when lines get longer.
"""

import ast
import functools
import io
import tokenize
from pathlib import Path

import pytest

from tests.conftest import MISSING, ROOT, imports_of
from tools import extras as extras_of
from tools import new

# To the next hundred. Why each has risen is in the log: git log -L '/^FOLDERS/,/^CORE/:tests/test_weight.py'
FOLDERS = {
    "answers": 3_000,
    "commands": 5_200,
    "config": 3_900,
    "data": 14_400,
    "demo": 1_000,
    "evaluation": 4_000,
    "images": 7_500,
    "models": 22_500,
    "parallel": 3_700,
    "process": 3_700,
    "rollouts": 4_900,
    "run": 19_400,
    "text": 21_000,
    "training": 3_200,
}
# A copy of a template, without what it can do without: see tools/new.py.
TEMPLATES = {
    "distill": 91_300,
    "dpo": 86_600,
    "full_finetune": 78_500,
    "grpo": 86_300,
    "image_classification": 64_200,
    "lora_finetune": 81_900,
    "pretrain": 70_700,
    "pretrain_pipeline": 68_400,
    "text_classification": 71_100,
    "token_classification": 74_900,
}
# What few runs need, each imported by the function that asks.
EXTRAS = {
    "averages": 300,
    "comparisons": 6_300,
    "deepspeed": 1_000,
    "distillation": 3_500,
    "engines": 2_100,
    "experts": 2_500,
    "masked": 1_400,
    "mirror": 3_800,
    "mixture": 1_100,
    "optimizers": 1_800,
    "pipeline": 1_700,
    "proofs": 15_600,
    "refill": 1_300,
    "rehearsal": 500,
    "remote": 1_200,
    "replicas": 1_600,
    "report": 2_900,
    "reward_model": 1_800,
    "sequence": 1_900,
    "streaming": 4_500,
    "tagging": 6_500,
    "tars": 1_200,
    "tensor": 700,
    "turns": 1_400,
    "vision": 6_200,
}
CORE = 117_400
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


@pytest.mark.parametrize("extra", [extra for extra in EXTRAS if extra not in MISSING])
def test_an_extra_weighs_no_more(extra):
    assert 0 < sum(map(weight, parts_of(extra))) <= EXTRAS[extra]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_copy_of_a_template_weighs_no_more(template, monkeypatch):
    monkeypatch.setattr(new, "imports", imports_of)
    files, _ = new.closure([ROOT / "templates" / f"{template}.py"], extras_of.chosen((template,), ()))
    assert sum(map(weight, files)) <= TEMPLATES[template]
