"""Conversations to tokens for fine-tuning."""

from __future__ import annotations

# For a model that has no chat template of its own: plain words, and the end-of-text token that every model knows
# ends a turn, so no token has to be added to the vocabulary.
DEFAULT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ '### Assistant:\n' }}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}{{ '\n\n' }}"
    "{% else %}{{ '### ' + message['role'].capitalize() + ':\n' + message['content'] + '\n\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)
