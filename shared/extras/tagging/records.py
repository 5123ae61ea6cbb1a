"""Texts with tags, in the forms that people keep them in."""

import io
import keyword
import re
import sys
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from shared import demo
from shared.data import records
from shared.data.records import CONTINUES, Records, Source
from shared.process.errors import ConfigError

WORDS = ("tokens", "words")
TAGS = ("tags", "ner_tags", "labels")
SPANS = ("entities", "spans", "label", "labels")
FORMS = (
    "expected tokens and tags, or text and entities [{start, end, label}], or an export of Label "
    "Studio, or a CoNLL file (no .csv or .tsv): docs/data/tags.md"
)
# Chinese and Japanese put no spaces between words: each character is one
_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_ALONE}]|[^\W{_ALONE}]+|[^\w\s]")


@dataclass(frozen=True)
class Tagged:
    """A text.

    Args:
        where: it is.
        text: as a tokenizer gets it.
        bounds: of its words, the first character and the one after the last.
        tags: of its words.
    """

    where: str
    text: str
    bounds: Sequence[tuple[int, int]]
    tags: Sequence[str]


def read(source: Source, options: Any) -> Records:
    """(place, record) of each text of a source. A sentence of a CoNLL file is tokens and tags.

    Raises:
        ConfigError: a line of a CoNLL file that is none, with its place.
    """
    pieces: list[str] = []  # of a file of CoNLL
    for where, record in source.read():
        if {*record} <= {"text", CONTINUES}:
            pieces.append(record["text"])
            if CONTINUES not in record:
                yield from _conll(where, "".join(pieces), options)
                pieces = []
        elif "annotations" not in record or _annotation(record):  # else a task was skipped
            yield where, record


def tagged(where: str, record: dict[str, Any], options: Any) -> Tagged:
    """A record's text.

    Raises:
        ConfigError: it has none, with its place.
    """
    if "annotations" in record:
        texts = [value for value in record.get("data", {}).values() if isinstance(value, str)]
        if len(texts) != 1:
            raise ConfigError(f"{where}: the task has {len(texts)} texts, expected one")
        values = (one.get("value", {}) for one in _annotation(record)["result"])
        return _of_spans(where, texts[0], [value for value in values if "labels" in value])
    if name := _column(record, options.tokens_column, WORDS):
        if tags := _column(record, options.tags_column, TAGS):
            return _of_words(where, record[name], record[tags], options.tag_names)
        raise ConfigError(f"{where}: no column {' or '.join(TAGS)}: name it by --tags_column")
    if isinstance(record.get("text"), str) and (name := _column(record, None, SPANS)):
        return _of_spans(where, record["text"], record[name])
    raise ConfigError(f"{where}: {FORMS} (has: {', '.join(map(str, record))})")


def _annotation(record: dict[str, Any]) -> Any:
    """The newest one of a task of Label Studio, if it was not skipped."""
    done = [one for one in record["annotations"] if not one.get("was_cancelled")]
    return done[-1] if done else None


def _column(record: dict[str, Any], named: str | None, usual: Sequence[str]) -> str | None:
    names = (named,) if named else usual
    return next((name for name in names if isinstance(record.get(name), list)), None)


def _of_words(where: str, words: Any, tags: Any, names: Sequence[str]) -> Tagged:
    if not words or len(words) != len(tags):
        raise ConfigError(f"{where}: {len(words)} words have {len(tags)} tags")
    said = []
    for word, tag in zip(words, tags, strict=True):
        if not isinstance(word, str) or not word or word.isspace():
            raise ConfigError(f"{where}: a word is {records.kind(word)}, expected text")
        if names and isinstance(tag, int):
            if not 0 <= tag < len(names):
                raise ConfigError(
                    f"{where}: the tag {tag} has no name among the {len(names)} of --tag_names"
                )
            tag = names[tag]
        if not isinstance(tag, str | int) or isinstance(tag, bool) or tag == "":
            raise ConfigError(
                f"{where}: the tag of {word!r} is {records.kind(tag)}, expected a name or a number"
            )
        said.append(str(tag))
    starts = accumulate((len(word) + 1 for word in words), initial=0)
    bounds = [(start, start + len(word)) for start, word in zip(starts, words, strict=False)]
    return Tagged(where, " ".join(words), bounds, said)


def _of_spans(where: str, text: str, spans: Any) -> Tagged:
    """Words end where spans do, also inside of what would be one word."""
    found = []
    for span in spans:
        match span:
            case (
                [int(start), int(end), str(kind)]
                | {"start": int(start), "end": int(end), "label": str(kind)}
                | {"start": int(start), "end": int(end), "labels": [str(kind)]}
            ) if kind:
                pass
            case _:
                raise ConfigError(f"{where}: {span!r} is no entity, expected start, end and label")
        if not 0 <= start < end <= len(text) or not text[start:end].strip():
            raise ConfigError(
                f"{where}: {kind} from {start} to {end} is no part of the {len(text)} characters"
            )
        found.append((start, end, kind))
    found.sort()
    for (start, end, kind), (following, _, other) in pairwise(found):
        if following < end:
            raise ConfigError(
                f"{where}: {kind} from {start} and {other} from {following} overlap: "
                "a word has one tag"
            )
    edges = sorted({0, len(text), *(edge for start, end, _ in found for edge in (start, end))})
    kind_at = {start: kind for start, _, kind in found}
    bounds, tags = [], []
    for start, end in pairwise(edges):
        mark = "B"
        for word in _WORD.finditer(text, start, end):
            bounds.append(word.span())
            tags.append(f"{mark}-{kind_at[start]}" if start in kind_at else "O")
            mark = "I"
    if not bounds:
        raise ConfigError(f"{where}: the text is empty")
    return Tagged(where, text, bounds, tags)


def _conll(where: str, text: str, options: Any) -> Records:
    """Sentences of lines with a word first and its tag last, and an empty line between them. Of
    CoNLL-U, the tag is UPOS.
    """
    words: list[str] = []
    tags: list[str] = []
    first, width = 1, 0
    lines = text.split("\n")
    is_u = any(line.count("\t") == 9 for line in lines)  # CoNLL-U
    for number, line in enumerate([*lines, ""], 1):
        columns = line.strip("\r").split("\t" if "\t" in line else None)
        if (is_u and line[:1] == "#") or (len(columns) == 10 and not columns[0].isdecimal()):
            continue  # a comment, a token of several words, an empty node
        if len(columns) == 10:
            columns = columns[1:4:2]  # the word and UPOS
        if not columns or columns[0] in ("", "-DOCSTART-"):
            if words:
                names = options.tokens_column or WORDS[0], options.tags_column or TAGS[0]
                yield f"{where}:{first}", dict(zip(names, (words, tags), strict=True))
            words, tags, first = [], [], number + 1
        elif not 2 <= len(columns) <= 4 or len(columns) != (width := width or len(columns)):
            also = f", {width} before" * bool(width)
            raise ConfigError(f"{where}:{number}: {len(columns)} column(s){also}; {FORMS}")
        else:
            words.append(columns[0])
            tags.append(columns[-1])


def code_identity() -> list[object]:
    return [sys.version, demo.python_files()]


def code() -> Records:
    """Yield (where, {"tokens", "tags"}) of functions of the standard library: what is a keyword, a
    definition's name, a text, a comment or a number.
    """
    for where, record in demo.functions_of_packages():
        words: list[str] = []
        tags: list[str] = []
        before = ""
        lines = io.StringIO(record["text"]).readline
        try:
            for token in tokenize.generate_tokens(lines):
                kind = {
                    tokenize.STRING: "text",
                    tokenize.COMMENT: "comment",
                    tokenize.NUMBER: "number",
                }.get(token.type, "")
                if keyword.iskeyword(token.string):
                    kind = "keyword"
                elif before in ("def", "class"):
                    kind = "definition"
                before = token.string
                parts = token.string.split()
                words += parts
                tags += [f"{'I' if n else 'B'}-{kind}" if kind else "O" for n in range(len(parts))]
        except (tokenize.TokenError, SyntaxError):  # the function is cut
            pass
        yield where, {"tokens": words, "tags": tags}
