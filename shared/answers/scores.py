"""Scores of an answer beside a reference, as SQuAD counts them: Rajpurkar et al., arXiv 1606.05250,
and its evaluation script, version 1.1.
"""

import re
import string
from collections import Counter


def normalised(text: str) -> str:
    """Lower case, without punctuation, the words a, an and the, and superfluous spaces."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str, reference: str) -> float:
    """1 if the normalised texts are equal, else 0."""
    return float(normalised(answer) == normalised(reference))


def token_f1(answer: str, reference: str) -> float:
    """The harmonic mean of precision and recall of the normalised words; 1 if both have none."""
    words = [Counter(normalised(text).split()) for text in (answer, reference)]
    total = sum(count.total() for count in words)
    return 2 * (words[0] & words[1]).total() / total if total else 1.0
