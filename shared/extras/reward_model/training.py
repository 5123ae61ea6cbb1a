"""A language model with a head that scores answers, trained on pairs: loaded, scored, saved."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shared.config import parse as configs
from shared.data.order import IGNORED, Batch
from shared.models import adapters
from shared.models.attention import forward_rows
from shared.models.blocks import set_gradient_checkpointing
from shared.models.checks import learn_padding_token, require_tokens_fit
from shared.models.classifier import make_shardable
from shared.models.hub import attention_option
from shared.models.loading import dtype_of, freeze_outer_parts, without_adapters
from shared.models.text_classifier import load_text_classifier, text_heads
from shared.models.weights import gather_weights
from shared.process.errors import ConfigError
from shared.process.files import whole_folder
from shared.run.run import Run
from shared.training import defaults

NAMES = ("score",)  # of what the head returns


def load(setup: Any, tokenizer: Any, pairs: Any) -> nn.Module:
    """The model with a new head, or the one it was scored with before: all weights, or adapters
    beside the head. Chooses the learning rate, where none is given. Without dropout, as other
    losses of pairs.

    Args:
        setup: a `run.setup.Setup`.
        tokenizer: gets the token that pads.
        pairs: to train on, which are not packed.
    """
    setup.strategy.require("--loss_type reward")
    # a head that scores writes nothing
    config = setup.config = configs.replace(setup.config, show_answers=0)
    pairs.samples.why_not_packed = "a score is read at the end of an answer"
    model = _load_whole(config, padding_token(tokenizer, pairs.samples.end))
    width = defaults.width(model)
    rate = defaults.text_classification_rate(width, lora=not config.full)
    setup.set_defaults(f"a head that scores, width {width}", learning_rate=rate)
    require_tokens_fit(model, tokenizer, config.data.seq_length + 1)
    set_gradient_checkpointing(model, config.speed.gradient_checkpointing)
    learn_padding_token(model)
    freeze_outer_parts(model)
    if not config.full:
        precision = setup.accelerator.mixed_precision
        model.to({"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32))
        saved = (*config.adapter.modules_to_save, *text_heads(model))
        adapter = replace(config.adapter, modules_to_save=saved)
        model = adapters.add_adapters(model, adapter, "SEQ_CLS")
    make_shardable(without_adapters(model), of_text=True)
    return model.eval()


def _load_whole(config: Any, padding: int) -> Any:
    options = attention_option(config.speed.attn_implementation)
    name = config.model_name_or_path
    return load_text_classifier(name, NAMES, "regression", padding, **options)[0]


def padding_token(tokenizer: Any, end: int | None = None) -> int:
    """The id of a token that ends no answer, which pads: models take the score of the last token
    that is another one. The tokenizer pads with it from now on.

    Args:
        end: the token that most answers end with, if there is one.

    Raises:
        ConfigError: there is none.
    """
    named = [tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.unk_token_id]
    for number in [*named, *sorted(tokenizer.added_tokens_decoder)]:
        if number not in (None, tokenizer.eos_token_id, end):
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(number)
            tokenizer.padding_side = "right"
            return int(number)
    raise ConfigError(
        "the tokenizer has no token for padding but the one that ends answers: name another one "
        "as its pad_token"
    )


def begin(options: Any, *pairs: Any) -> Any:
    """Give the pairs their margins, if a column has them. Returns what makes `scores`."""
    if options.margin_column:
        for one in pairs:
            one.reference[:, 0] = one.samples.column("margin")[::2]
    return scores


def scores(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The score of each answer of a batch, read at its last learned token, [answers] fp32.

    Args:
        model: as of `load`, prepared.
        batch: as of `preferences.collate_pairs`, not packed.
    """
    padding = without_adapters(model).config.get_text_config().pad_token_id
    ids, labels = batch["input_ids"], batch["labels"]
    places = torch.arange(ids.shape[1] + 1, device=ids.device)
    last = (places[:-1] * (labels != IGNORED)).amax(1, keepdim=True)
    end = labels.gather(1, last).clamp(min=0)  # which no token follows
    ids = torch.cat([ids, end], 1).scatter(1, last + 1, end)
    ids = ids.masked_fill(places > last + 1, padding)
    row = {"input_ids": ids, "filled": last[:, 0] + 2}
    return forward_rows(model, row).logits[:, 0].float()


def save(run: Run, model: nn.Module, tokenizer: Any) -> None:
    """Write final/: the model with its head, as AutoModelForSequenceClassification loads it, in the
    precision of its base, tokenizer and card; with adapters also adapter/. Every rank calls this.
    """
    config = run.config
    dtype = dtype_of(config.model_name_or_path)
    of_adapter = {} if config.full else {"trainable_only": True}
    weights = gather_weights(
        run.accelerator, model, **of_adapter, dtype=dtype if config.full else None
    )
    if not run.is_main:
        return
    whole = run.unwrap(model)
    if not config.full:
        with whole_folder(run.dir / "adapter") as folder:
            whole.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
        base = _load_whole(config, tokenizer.pad_token_id)
        whole = adapters.merge_into(base, run.dir / "adapter").to(dtype)
    whole.config.dtype = dtype
    with whole_folder(run.dir / "final") as folder:
        whole.save_pretrained(folder, state_dict=weights if config.full else None)
        tokenizer.save_pretrained(folder)
        load_lines = f"""import transformers

model = transformers.{type(whole).__name__}.from_pretrained("final")
tokenizer = transformers.AutoTokenizer.from_pretrained("final")
# a conversation that ends with an answer, and with the token that ends it
score = model(**tokenizer("...", return_tensors="pt")).logits[0, 0]"""
        title = "Reward model"
        run.write_card(folder, title, load=load_lines, pipeline_tag="text-classification")
