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
from tools import new

# 2026-11-27: what there is, to the next hundred, in lines of 100 columns.
# 2026-11-28, first runs: a summary that fits the console beside a file with all of it, refusals before anything is loaded,
# advice on what is cut, cards that answer, the worst answers: answers, data, process, run, text, and each template.
FOLDERS = {
    # 2026-11-28: answers to validation prompts, and their scores
    # 2026-11-29: numbers by value, texts as written, batches in which no answer depends on another (900)
    # and the evaluation that two templates had each
    "answers": 2_800,
    "commands": 5_000,  # 2026-11-29: evaluate without training data, a column for each run; ask with training's prompt (550)
    "config": 3_700,
    # labels and the store, before in text and images; 2026-11-28: parts of rows; samples drawn many at once
    # 2026-11-29: maps and decimals of Parquet, sizes of downloads, lines of bad bytes, equal names (600)
    "data": 16_200,
    "demo": 1_000,
    # 2026-11-29: a class's weight times the smoothed loss of its sample; an evaluation that two templates had each
    "evaluation": 4_000,
    # 2026-11-28: products in the launch's precision, 4 bits, adapters
    # 2026-11-29: adapters that PEFT takes for experts', computed beside the weight
    "experts": 2_200,
    "images": 8_300,  # 2026-11-29: sizes of what is decoded; files to validate on beside a data set
    # 2026-11-29: angles by document (700), packing tried in long rows, padding that a model sees, ends (500)
    "models": 24_500,
    # 2026-11-28: what of a step differs by launch came from training and run; shared rows (900)
    # 2026-11-29: fp32 weights beside bf16 ones, and DoRA, are one line
    # and the interface of what checkpoints keep
    "parallel": 6_200,
    # start.py and cache_dir came from config, record_end from run
    # 2026-11-29: threads that sleep; ids of processes that have ended
    "process": 3_700,
    "rollouts": 3_500,  # 2026-11-28: answers that the model in training samples, for grpo.py, whose main is 35 lines
    # 2026-11-28: tuned.py came from dpo.py
    # 2026-11-29: checkpoints renamed, mixed or with a damaged manifest; runs that are copies; keys of references
    # and prepared.py, and parts that checkpoints keep, which know no other capability
    "run": 19_100,
    # 2026-11-29: what all records give the template, prompts of pairs, marks of images; positions of padding
    "text": 22_300,
    # flags of replicas came from config; a step may take batches that the template made; what replicas keep
    "training": 6_400,
    "vision": 6_000,  # 2026-11-28: images in conversations
}
# With all that they import; each decides whether to compile. 2026-11-28: dpo, full_finetune and lora_finetune score answers;
# templates of texts compute experts (700), with adapters also in 4 bits (2,100). GPUs share the tokens of rows: 2,500, and
# 700 to 1,800 in templates that do not. full_finetune and lora_finetune take images in conversations (6,000 and hooks).
# 2026-11-29: faults found by trying other tools' reports, 1,700 in image_classification to 4,500 in dpo. What checkpoints
# keep has an interface (500).
# Mains of 35 lines: 3,300 tokens went from the templates into answers, evaluation, rollouts, run and text (600 a copy).
TEMPLATES = {
    "dpo": 93_400,
    "full_finetune": 91_500,
    "grpo": 90_200,  # 2026-11-28: new
    "image_classification": 69_900,
    "lora_finetune": 94_900,
    "pretrain": 79_500,  # 2026-11-28: the only one that imports replicas
    "pretrain_pipeline": 75_000,
    "text_classification": 81_100,
}
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


def test_every_folder_and_template_has_a_limit():
    assert {path.name for path in (ROOT / "shared").iterdir() if any(path.glob("*.py"))} == FOLDERS.keys()
    assert {path.stem for path in (ROOT / "templates").glob("*.py")} == TEMPLATES.keys()


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_weighs_no_more(folder):
    assert sum(map(weight, (ROOT / "shared" / folder).rglob("*.py"))) <= FOLDERS[folder]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_and_its_imports_weigh_no_more(template, monkeypatch):
    monkeypatch.setattr(new, "imports", imports_of)
    files, _ = new.closure([ROOT / "templates" / f"{template}.py"])
    assert sum(map(weight, files)) <= TEMPLATES[template]
