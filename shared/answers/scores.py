"""Scores of an answer beside a reference: of words as SQuAD counts them (Rajpurkar et al., arXiv
1606.05250), of numbers by their value, of anything else as it is written.
"""

import re
from collections import Counter
from decimal import Decimal
from typing import Any

_NUMBER = re.compile(
    r"((?<![\w)\]])-)?[$€£¥]?(?<!\d)(?<!\d\.)"  # between two numbers, a hyphen is no sign
    r"(\d{1,3}(?:,\d{2,3})*,\d{3}(?!,?\d)|\d+|(?<![\w.])(?=\.\d))"  # commas separate thousands
    r"(\.\d+)?(e[-+]?\d{1,3}(?!\d))?(?: ?/ ?(\d+)(?![.,]?\d))?"
)
_OPENING = "([{*_`\"'“‘«#$"
_CLOSING = ".,;:!?…)]}*_`\"'”’»$。，、；：！？"
_WORD = re.compile(r"\w+|[^\W\d_]+(?:['’][^\W\d_]+|-[^\W\d_]{2,})*")
_CHINESE_OR_JAPANESE = re.compile(r"([\u3040-\u30ff\u3400-\u9fff])")  # no spaces between words
_ARTICLE = re.compile(r"(?<!\S)(?:a|an|the)\s+(?=[^\W\d_]{2})")
_FORMULA = re.compile(  # of a text whose numbers are 0
    r"[<>≤≥≠+*^|()\[\]]|\\(?!boxed|text)[a-z]"  # signs, LaTeX
    r"|(?<![^\W\d_]{2})/|\b[^\W\d_]\s*-|-\s*[^\W\d_]\b|\b[^\W\d_]0"  # a/b, x - y, B2, not km/h
)


def _plain(text: Any) -> str:
    return str(text).lower().replace("\u2212", "-")  # the minus sign of typography


def _value(number: re.Match[str]) -> Decimal:
    sign, whole, decimals, exponent, divisor = (part or "" for part in number.groups())
    value = Decimal(f"{sign}{whole.replace(',', '') or 0}{decimals}{exponent}")
    return value / (Decimal(divisor or 1) or 1)


def numbers_in(text: Any) -> list[Decimal]:
    """The numbers in a text, also as 1,000, .5, -5, $5, 1e3 and 1/2."""
    return [_value(number) for number in _NUMBER.finditer(_plain(text))]


def normalised(text: str) -> list[str | Decimal]:
    """The words of a text in lower case, without the punctuation around and within them and without
    the articles a, an and the; the values of its numbers; other parts between spaces as they are.
    """
    text = _CHINESE_OR_JAPANESE.sub(r" \1 ", _ARTICLE.sub("", _plain(text)))
    parts: list[str | Decimal] = []
    for part in text.split():
        core = part.lstrip(_OPENING).rstrip(_CLOSING)
        if number := _NUMBER.fullmatch(core):
            parts.append(_value(number))
        elif _WORD.fullmatch(core):
            parts.append(re.sub("['’-]", "", core))
        else:
            parts.append(part.lstrip("#").rstrip(".,;:!?…。，、；：！？"))
    return [part for part in parts if part != ""] or [*text.split()]


def exact_match(answer: str, reference: str) -> float:
    """1 if the normalised texts are equal, else 0."""
    return float(normalised(answer) == normalised(reference))


def token_f1(answer: str, reference: str) -> float:
    """The harmonic mean of precision and recall of the normalised parts; 1 if both have none."""
    words = [Counter(normalised(text)) for text in (answer, reference)]
    total = sum(count.total() for count in words)
    return 2 * (words[0] & words[1]).total() / total if total else 1.0


def solves(answer: str, reference: Any) -> float:
    """1 if the last number of an answer is that of a reference, else 0; remarks in brackets do not
    count. A reference without numbers, a formula or a list has to be matched exactly.
    """
    if reference is None:
        return 0.0
    result = re.split(r"####|(?<![<>!])=", _plain(reference))[-1]
    right = numbers_in(result)
    rest = _NUMBER.sub("0", result)
    is_list = len(right) > 1 and not re.search(r"[^\W\d_]{2}", rest)
    if not right or is_list or _FORMULA.search(rest):
        return exact_match(answer, str(reference))
    found = numbers_in(re.sub(r"\([^\W\d_][^()]*\)", " ", answer)) or numbers_in(answer)
    return float(found[-1:] == right[-1:])


def like_reference(answer: str, record: dict[str, Any]) -> dict[str, float]:
    """`exact_match` and `token_f1` of an answer beside `record["reference"]`."""
    reference = record["reference"]
    return {
        "exact_match": exact_match(answer, reference),
        "token_f1": token_f1(answer, reference),
    }
