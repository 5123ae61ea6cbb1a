"""A reward model that is asked for scores of answers."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from shared.extras.reward_model.training import padding_token
from shared.models.checks import require_tokens_fit
from shared.models.hub import from_hub, identity_of_weights
from shared.models.tokenizers import load_tokenizer, require_same_tokens
from shared.process.errors import ConfigError


class RewardModel:
    """A frozen model that scores prompts with answers, whole on each rank.

    Args:
        setup: a `run.setup.Setup`; its config names the model.
        tokenizer: the policy's, which must be the model's, too.
        length: tokens of the longest prompt with its answer.

    Raises:
        ConfigError: it cannot be loaded, has another tokenizer, or scores several things.
    """

    def __init__(self, setup: Any, tokenizer: Any, length: int) -> None:
        name = setup.config.reward_model
        require_same_tokens(tokenizer, load_tokenizer(name), name, "policy")
        config = from_hub(AutoConfig, name)
        if config.num_labels != 1:
            raise ConfigError(f"{name}: has {config.num_labels} labels, a reward model has one")
        of_text = config.get_text_config()
        if of_text.pad_token_id is None:
            of_text.pad_token_id = padding_token(load_tokenizer(name))
        on_gpu = setup.device.type != "cpu" and torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        self.padding = of_text.pad_token_id
        self.model = from_hub(
            AutoModelForSequenceClassification,
            name,
            config=config,
            use_safetensors=True,
            dtype=torch.bfloat16 if on_gpu else torch.float32,
        )
        require_tokens_fit(self.model, tokenizer, length, f"{name}: longest prompt with an answer")
        self.model.requires_grad_(False).eval().to(setup.device)
        self.at_once = setup.config.batch.per_device_eval_batch_size
        self.identity = identity_of_weights(name, self.model)
        setup.about["reward model"] = f"{name}, in {self.model.dtype}"

    @torch.no_grad()
    def __call__(self, texts: list[list[int]]) -> list[float]:
        """The score of each text, a list of token ids: those of similar lengths together."""
        order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
        found = [0.0] * len(texts)
        for start in range(0, len(order), self.at_once):
            chosen = order[start : start + self.at_once]
            longest = len(texts[chosen[-1]])
            rows = [texts[n] + [self.padding] * (longest - len(texts[n])) for n in chosen]
            ids = torch.tensor(rows)
            lengths = torch.tensor([[len(texts[n])] for n in chosen])
            mask = (torch.arange(longest) < lengths).long()
            device = self.model.device
            logits = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
            for number, score in zip(chosen, logits[:, 0].tolist(), strict=True):
                found[number] = score
        return found
