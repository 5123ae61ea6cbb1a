"""What classifiers of images and of texts have in common: names of classes, a head, blocks that can
be sharded.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import DistributedType
from torch import nn

from shared.data.order import Batch
from shared.models.counts import measure
from shared.models.hub import from_hub
from shared.process.errors import ConfigError
from shared.process.printing import note


def load_classifier(
    auto_class: Any,
    name: str,
    config: Any,
    classes: tuple[str, ...],
    heads_of: Callable[[Any], list[nn.Module]],
    *,
    may_be_new: str = "",
    **options: Any,
) -> tuple[Any, tuple[str, ...]]:
    """A classifier of these classes with the weights of `name`, fp32, and the order in which it
    scores them.

    If its labels are these classes, it keeps its head and its order. Otherwise it gets a new head,
    also if it has as many labels with other names: the old head means other things.

    Args:
        config: that of `name`.
        heads_of: gives the modules of the head.
        may_be_new: name of modules of the backbone that may be missing in the files.
        options: of `from_pretrained`.

    Raises:
        ConfigError: it cannot be loaded, or weights of its backbone are missing.
    """
    known = config.id2label
    keeps_head = set(known.values()) == set(classes) and len(known) == len(classes)
    if keeps_head:
        classes = tuple(known[number] for number in range(len(classes)))
    name_classes(config, classes)
    model, info = from_hub(
        auto_class,
        name,
        config=config,
        use_safetensors=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        dtype=torch.float32,
        **options,
    )
    head = heads_of(model)
    in_head = {p for module in head for p in module.parameters()}
    of_head = {key for key, p in model.named_parameters() if p in in_head}
    lost = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    new = {key for key in lost if may_be_new in key.split(".")}
    if of_backbone := lost - of_head - new:
        raise ConfigError(
            f"{name}: {len(of_backbone)} weights of the backbone are missing or of another "
            f"shape: {min(of_backbone)}"
        )
    if new:
        note(f"{name}: its {may_be_new} has no weights in the files, so it begins anew")
    if keeps_head and not lost & of_head:
        note(f"{name}: its head is kept")
        return model, classes
    for part in (part for module in head for part in module.modules()):
        if isinstance(part, nn.Linear | nn.Conv2d):
            nn.init.trunc_normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    outputs = "one number" if len(classes) == 1 else f"{len(classes)} classes"
    note(f"{name}: a new head for {outputs} (on resume the checkpoint has it)")
    return model, classes


def name_classes(config: Any, classes: tuple[str, ...]) -> None:
    """Put the names of the classes, and so their number, into a model's config."""
    config.num_labels = len(classes)  # PVT's configs have a number of their own
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: number for number, name in config.id2label.items()}
    if hasattr(config, "label_names"):  # timm's own, which would win when the config is saved
        config.label_names = list(classes)
    for key in ("num_classes", "in_chans", "global_pool"):  # which timm writes twice
        (getattr(config, "model_args", None) or {}).pop(key, None)


def measure_on_device(
    setup: Any, model: nn.Module, inputs: Batch, memory_format: Any = torch.preserve_format
) -> None:
    """Note a classifier's FLOPs, for MFU, and freeze what takes no part in them: see
    `counts.measure`. Afterwards the model is on the device, or ready to be sharded.

    Args:
        setup: a `run.setup.Setup`.
        inputs: one sample.
    """
    is_sharded = setup.accelerator.distributed_type == DistributedType.FSDP
    device = torch.device("cpu") if is_sharded else setup.device  # on which it may not fit whole
    model.to(device).to(memory_format=memory_format)
    with setup.accelerator.autocast():
        setup.flops = measure(model, {name: x.to(device) for name, x in inputs.items()})


def make_shardable(model: Any, *, of_text: bool = False) -> None:
    """Give a classifier what FSDP2 of Accelerate asks for: input embeddings and the class names of
    its blocks.

    There are no embeddings to cut where they are in blocks already (BERT's), or of images.
    """
    names = {type(module).__name__ for module in model.modules()}
    if names.isdisjoint(model._no_split_modules or ()):
        kinds = (nn.ModuleList, nn.Sequential)
        lists = [[*module] for module in model.modules() if isinstance(module, kinds)]
        alike = [blocks for blocks in lists if len({type(block) for block in blocks}) == 1]
        model._no_split_modules = sorted(
            {
                type(blocks[0]).__name__
                for blocks in alike
                if any([*block.parameters()] for block in blocks)
            }
        )
    blocks = (
        module for module in model.modules() if type(module).__name__ in model._no_split_modules
    )
    if not of_text or model.get_input_embeddings() in {
        part for block in blocks for part in block.modules()
    }:
        model.get_input_embeddings = lambda: None
