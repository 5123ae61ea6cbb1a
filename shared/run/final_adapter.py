"""What a run that tunes adapters leaves: final/ and, if asked, merged/."""

from pathlib import Path
from typing import Any

from torch import nn

from shared.models import adapters
from shared.models.card import load_line, usage
from shared.models.generation import end_generation_at
from shared.models.loading import copy_processor
from shared.models.weights import gather_weights
from shared.process.files import whole_folder
from shared.process.printing import print_main
from shared.run.run import Run


def save_adapter(run: Run, model: nn.Module, tokenizer: Any, *, end: int | None) -> None:
    """Write final/ (adapter, tokenizer, card) and, with --merge_adapter, merged/. Every rank calls
    this.

    Args:
        end: the token that ends a turn, if there is one.
    """
    config = run.config
    name = run.config.model_name_or_path
    weights = gather_weights(run.accelerator, model, trainable_only=True)
    if not run.is_main:
        return
    whole = run.unwrap(model)
    end_generation_at(whole, tokenizer, end)
    with whole_folder(run.dir / "final") as folder:
        whole.save_pretrained(
            folder,
            state_dict=weights,
            save_embedding_layers=False,
            selected_adapters=["default"],  # not that of a teacher
        )
        whole.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        copy_processor(name, folder)
        title = f"LoRA adapter of {Path(name).name}"
        load = usage(adapters.load_line(whole), tokenizer)
        run.write_card(folder, title, load=load, library_name="peft")
    if config.adapter.merge_adapter:
        merged = adapters.merge(
            name, config.adapter, config.speed, run.accelerator, run.dir / "final"
        )
        merged.generation_config = whole.generation_config
        with whole_folder(run.dir / "merged") as folder:
            merged.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            copy_processor(name, folder)
            title = f"{Path(name).name} with a LoRA adapter merged in"
            load = usage(load_line(merged), tokenizer).replace('"final"', '"merged"')
            run.write_card(folder, title, load=load)
        print_main(f"base with adapter in {run.dir}/merged")
    elif (run.dir / "merged").exists():
        print_main(
            f"warning: {run.dir}/merged holds an earlier adapter: to renew it, delete "
            "it and add --merge_adapter"
        )
