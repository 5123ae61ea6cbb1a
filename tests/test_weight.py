"""How much code a reader takes over, in tokens: names, numbers, strings, operators and keywords, no comments or docstrings.

A limit may rise only with a reason beside it. Tokens, unlike lines, do not shrink when lines get longer.
"""

import ast
import io
import tokenize
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tools.new import closure

# 2026-11-27: what there is, to the next hundred, in lines of 100 columns.
# 2026-11-28, first runs: a summary that fits the console beside a file with all of it, refusals before anything is loaded,
# advice on what is cut, cards that answer, the worst answers: answers, data, process, run, text, and each template.
FOLDERS = {
    "answers": 1_600,  # 2026-11-28: answers to validation prompts, and their scores
    "commands": 4_400,
    "config": 3_700,
    "data": 15_500,  # labels and the store, before in text and images; 2026-11-28: parts of rows; samples drawn many at once
    "demo": 1_000,
    "evaluation": 3_200,
    "experts": 2_100,  # 2026-11-28: products in the launch's precision, 4 bits, adapters
    "images": 8_100,
    "models": 22_500,
    "parallel": 5_800,  # 2026-11-28: what of a step differs by launch came from training and run; shared rows (900)
    "process": 3_600,  # start.py and cache_dir came from config, record_end from run
    "rollouts": 3_300,  # 2026-11-28: answers that the model in training samples, for grpo.py
    "run": 18_000,  # 2026-11-28: tuned.py came from dpo.py
    "text": 20_800,
    "training": 6_300,  # flags of replicas came from config; a step may take batches that the template made
    "vision": 6_000,  # 2026-11-28: images in conversations
}
# With all that they import; each decides whether to compile. 2026-11-28: dpo, full_finetune and lora_finetune score answers;
# templates of texts compute experts (700), with adapters also in 4 bits (2,100). GPUs share the tokens of rows: 2,500, and
# 700 to 1,800 in templates that do not. full_finetune and lora_finetune take images in conversations (6,000 and hooks).
TEMPLATES = {
    "dpo": 87_800,
    "full_finetune": 86_300,
    "grpo": 85_100,  # 2026-11-28: new
    "image_classification": 67_100,
    "lora_finetune": 89_700,
    "pretrain": 75_500,  # 2026-11-28: the only one that imports replicas
    "pretrain_pipeline": 67_900,
    "text_classification": 77_300,
}
LAYOUT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


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


def test_every_folder_and_template_has_a_limit():
    assert {path.name for path in (ROOT / "shared").iterdir() if any(path.glob("*.py"))} == FOLDERS.keys()
    assert {path.stem for path in (ROOT / "templates").glob("*.py")} == TEMPLATES.keys()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_weighs_no_more(folder):
    assert sum(map(weight, (ROOT / "shared" / folder).rglob("*.py"))) <= FOLDERS[folder]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_and_its_imports_weigh_no_more(template):
    path = ROOT / "templates" / f"{template}.py"
    assert sum(map(weight, closure([path])[0])) <= TEMPLATES[template]
