"""What an assistant says is learned, or refused, in each spelling that files have and with each way templates write it."""

import pytest

from shared.process.errors import ConfigError
from tests.known_bugs.test_conversations import CALLS, CHATML, HEADED, LAST, USER, learns  # noqa: F401

CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "n", "arguments": {"d": "m"}}}]}
RESULT = {"role": "tool", "content": "it saw"}
PLUS = HEADED.replace("BODY", "{{ m['content'] + '' }}" + CALLS.split("{{ m['content'] }}")[1].split("{% endfor %}{% if")[0])


@pytest.mark.parametrize("template", [CALLS, PLUS], ids=["direct", "joined"])
@pytest.mark.parametrize("nothing", [{}, {"content": None}, {"content": None, "refusal": None, "function_call": None}])
def test_a_null_content_beside_calls_is_as_an_absent_one(learns, template, nothing):  # noqa: F811
    """OpenAI returns it so: platform.openai.com/docs/api-reference/chat (2023). Templates wrote None, or refused."""
    messages = [USER, {**CALL, **nothing}, RESULT, LAST]
    expected = learns({"messages": [USER, {**CALL, "content": ""}, RESULT, LAST]}, template)
    assert learns({"messages": messages}, template) == expected == ['n{"d": "m"}<|im_end|>', "it saw many<|im_end|>"]


def test_a_dropped_call_whose_words_are_in_the_end_token_is_refused(learns):  # noqa: F811
    """slime#330 (2025), again: `n` is a letter of `<|im_end|>`, and was taken for a written name."""
    with pytest.raises(ConfigError, match=r"^here: .*nothing of what the assistant says in message 2.*empty answer"):
        learns({"messages": [USER, {**CALL, "content": ""}, RESULT, LAST]}, CHATML)


def test_the_older_form_of_a_call_is_learned(learns):  # noqa: F811
    """OpenAI's `function_call` (2023) was passed over, and an empty answer was learned."""
    older = {"role": "assistant", "content": "", "function_call": {"name": "n", "arguments": '{"d": "m"}'}}
    assert learns({"messages": [USER, older]}, CALLS) == ['n{"d": "m"}<|im_end|>']
