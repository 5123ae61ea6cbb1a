"""Masked language models (BERT: Devlin et al., arXiv 1810.04805; ModernBERT: Warner et al., arXiv
2412.13663): masked rows of a corpus, and the model that learns them.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate import DistributedType
from accelerate.state import AcceleratorState
from transformers import AutoConfig, AutoModelForMaskedLM, ModernBertConfig

from shared.data.loader import Loader
from shared.data.order import IGNORED, Row
from shared.models.checks import require_tokens_fit
from shared.models.hub import attention_option, from_architecture, from_hub, override
from shared.models.loading import use_launch_precision
from shared.models.options import PRESETS, ModelConfig
from shared.models.tokenizers import vocabulary_size
from shared.process.errors import ConfigError
from shared.process.printing import note
from shared.text.packing import collate_packed, collate_padded

MASK = "[MASK]"


class Masking:
    """Hides a share of a row's tokens: they become its labels, and all other labels IGNORED.
    Equally many in each row.

    Args:
        tokenizer: with a mask token.
        probability: share of the tokens that are chosen, never special ones.
        unmasked: share of these that are not masked: half of them are other tokens, half as they
            are. BERT has 0.15 and 0.2, ModernBERT 0.3 and 0.
        whole_words: choose all tokens of a word, where its tokens tell.
    """

    def __init__(
        self, tokenizer: Any, probability: float, unmasked: float, whole_words: bool
    ) -> None:
        self.probability = probability
        self.unmasked = unmasked
        self.mask = tokenizer.mask_token_id
        names = tokenizer.get_vocab()
        self.is_special = np.zeros(vocabulary_size(tokenizer), bool)
        self.is_special[tokenizer.all_special_ids] = True
        self.others = np.array(sorted({*names.values()} - {*tokenizer.all_special_ids}))
        self.goes_on = np.zeros(len(self.is_special), bool)
        if whole_words:
            begins = tuple(
                mark for mark in ("Ġ", "▁") if any(name.startswith(mark) for name in names)
            )
            for name, number in names.items():
                self.goes_on[number] = not name.startswith(begins) if begins else name[:2] == "##"

    def count(self, row: Row) -> int:
        return max(1, round(len(row["input_ids"]) * self.probability))

    def again(self, row: Row) -> Row:
        """The row with another mask, by NumPy's global generator."""
        ids = np.where(row["labels"] == IGNORED, row["input_ids"], row["labels"])
        return self({**row, "input_ids": ids}, np.random.randint(2**31))

    def __call__(self, row: Row, seed: int) -> Row:
        draw = np.random.default_rng(seed)
        ids = row["input_ids"]
        # words in a random order, special tokens last
        word = np.cumsum(~self.goes_on[ids] | self.is_special[ids])
        place = draw.permutation(int(word[-1]) + 1)[word] + len(ids) * self.is_special[ids]
        chosen = np.argsort(place, kind="stable")[: self.count(row)]
        labels = np.full_like(ids, IGNORED)
        labels[chosen] = ids[chosen]
        how = draw.random(len(chosen))
        masked = np.where(how >= self.unmasked, self.mask, ids[chosen])
        other = draw.choice(self.others, len(chosen))
        read = ids.copy()
        read[chosen] = np.where(how < self.unmasked / 2, other, masked)
        return {**row, "input_ids": read, "labels": labels}


@dataclass(frozen=True)
class MaskedRows:
    """`order.Samples`, each with a mask by its number alone."""

    rows: Any  # with `input_ids` of one length
    masking: Masking

    def __len__(self) -> int:
        return len(self.rows)

    def num_targets(self, indices: np.ndarray) -> int:
        return len(indices) * self.masking.count(self.rows[int(indices[0])])

    def __getitem__(self, index: int) -> Row:
        return self.masking(self.rows[index], index)


def mask(data: Any, probability: float, unmasked: float, whole_words: bool) -> None:
    """Mask the rows of a `CorpusData`: those to train on anew in each epoch, those to validate on
    always alike. Gives its tokenizer a mask token, if it has none.
    """
    if data.tokenizer.mask_token is None:
        data.tokenizer.add_special_tokens({"mask_token": MASK})
    masking = Masking(data.tokenizer, probability, unmasked, whole_words)
    for loader in (data.train, data.validation):
        if isinstance(loader, Loader):
            loader.samples = MaskedRows(loader.samples, masking)
        else:
            loader.view = partial(MaskedRows, masking=masking)
        if loader.collate is not collate_packed:  # which also says where the targets are
            loader.collate = collate_padded
    data.train.transform = masking.again
    data.bytes_per_token = None  # the loss is of masked tokens


def build_masked_lm(config: ModelConfig, tokenizer: Any, seq_length: int, attention: str) -> Any:
    """A masked language model with fp32 weights: loaded, of an architecture, or a ModernBERT of the
    preset's sizes.

    Raises:
        ConfigError: there is no such model, or it does not fit the tokenizer or `seq_length`.
    """
    options: dict[str, Any] = attention_option(attention) | {"dtype": torch.float32}
    if config.model_name_or_path:
        if config.config_overrides:
            raise ConfigError("--config_overrides cannot change a model whose weights are loaded")
        name = config.model_name_or_path
        model, info = from_hub(
            AutoModelForMaskedLM,
            name,
            use_safetensors=True,
            output_loading_info=True,
            **options,
        )
        if lost := sorted(info["missing_keys"]):
            if any(key.startswith(model.base_model_prefix) for key in lost):
                raise ConfigError(f"{name}: weights are missing in its files, such as {lost[0]}")
            note(f"{name}: a new head (on resume the checkpoint has it)")
        if vocabulary_size(tokenizer) > model.config.vocab_size:
            model.resize_token_embeddings(vocabulary_size(tokenizer))
    else:
        hidden, blocks, heads, _, feed_forward = PRESETS[config.model_preset]
        architecture = ModernBertConfig(
            hidden_size=hidden,
            num_hidden_layers=blocks,
            num_attention_heads=heads,
            intermediate_size=feed_forward,
            max_position_embeddings=max(8192, seq_length),
        )
        if config.config_name:
            architecture = from_hub(AutoConfig, config.config_name)
        architecture.vocab_size = vocabulary_size(tokenizer)
        for token in ("bos", "eos", "cls", "sep", "pad"):
            setattr(architecture, f"{token}_token_id", getattr(tokenizer, f"{token}_token_id"))
        override(architecture, config.config_overrides)
        blocks = architecture.num_hidden_layers
        if not config.config_name:  # each third attends globally
            architecture.layer_types = ModernBertConfig(num_hidden_layers=blocks).layer_types
        model = from_architecture(AutoModelForMaskedLM, architecture, **options)
    require_tokens_fit(model, tokenizer, seq_length)
    use_launch_precision(model)
    head = model.get_output_embeddings()
    bias = getattr(head, "bias", None)
    # BERT's head has its bias by two names, which FSDP refuses
    for module in model.modules():
        if module is not head and module._parameters.get("bias") is bias is not None:
            del module.bias
    if AcceleratorState().distributed_type == DistributedType.FSDP:
        places = Counter(
            p for module in model.modules() for p in module._parameters.values() if p is not None
        )
        if {p for p, count in places.items() if count > 1} - {head.weight}:
            raise ConfigError(
                f"{type(model).__name__} ties more than its embeddings, which FSDP cannot shard: "
                "use ddp.yaml"
            )
        # Accelerate shards the embeddings with the head, not as a block
        inside = [m for m in model.modules() if model.get_input_embeddings() in m.children()]
        model._no_split_modules = sorted(
            {*model._no_split_modules} - {type(module).__name__ for module in inside}
        )
    return model
