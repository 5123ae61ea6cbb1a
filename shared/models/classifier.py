"""What classifiers of images and of texts have in common: names of classes, a head, blocks that can
be sharded.
"""

from typing import Any

from torch import nn

from shared.process.errors import ConfigError
from shared.process.printing import note


def keeps_its_head(config: Any, classes: tuple[str, ...]) -> tuple[bool, tuple[str, ...]]:
    """(whether a model with this config scores these classes already, the classes in the order of
    its scores).
    """
    known = config.id2label
    if set(known.values()) != set(classes) or len(known) != len(classes):
        return False, classes
    return True, tuple(known[number] for number in range(len(classes)))


def settle_head(
    name: str,
    model: Any,
    info: dict[str, Any],
    head: list[nn.Module],
    keeps_head: bool,
    may_be_new: str = "",
) -> None:
    """Refuse a model whose backbone was not loaded whole, and give it a new head where it does not
    keep its own.

    Args:
        info: of `from_pretrained`.
        head: the modules of the head.
        may_be_new: name of modules of the backbone that may be missing in the files.

    Raises:
        ConfigError: weights of the backbone are missing.
    """
    in_head = {id(p) for module in head for p in module.parameters()}
    of_head = {key for key, p in model.named_parameters() if id(p) in in_head}
    lost = {
        key if isinstance(key, str) else key[0]
        for key in [*info["missing_keys"], *info["mismatched_keys"]]
    }
    keeps_head = keeps_head and not lost & of_head
    new = {key for key in lost if may_be_new in key.split(".")}
    if of_backbone := lost - of_head - new:
        raise ConfigError(
            f"{name}: {len(of_backbone)} weights of the backbone are missing or of another "
            f"shape: {min(of_backbone)}"
        )
    if new:
        note(
            f"{name}: its {may_be_new} has no weights in the files, so it begins anew (on resume "
            "the checkpoint has it)"
        )
    if keeps_head:
        note(f"{name}: its head is kept")
        return
    for part in (part for module in head for part in module.modules()):
        if isinstance(part, nn.Linear | nn.Conv2d):
            nn.init.trunc_normal_(part.weight, std=0.02)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    outputs = "one number" if model.config.num_labels == 1 else f"{model.config.num_labels} classes"
    note(f"{name}: a new head for {outputs} (on resume the checkpoint has it)")


def name_classes(config: Any, classes: tuple[str, ...]) -> None:
    """Put the names of the classes, and so their number, into a model's config. What it said of
    several labels goes.
    """
    if config.problem_type == "multi_label_classification":
        config.problem_type = None
    if set(getattr(config, "thresholds", ())) != set(classes):  # of other classes
        config.__dict__.pop("thresholds", None)
    config.num_labels = len(classes)  # PVT's configs have a number of their own
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: number for number, name in config.id2label.items()}
    if hasattr(config, "label_names"):  # timm's own, which would win when the config is saved
        config.label_names = list(classes)
    for key in ("num_classes", "in_chans", "global_pool"):  # which timm writes twice
        (getattr(config, "model_args", None) or {}).pop(key, None)


def make_shardable(model: Any, *, of_text: bool = False) -> None:
    """Give a classifier what FSDP2 of Accelerate asks for: input embeddings and the class names of
    its blocks.

    There are no embeddings to cut where they are in blocks already (BERT's), or of images.
    """
    if not {type(module).__name__ for module in model.modules()} & set(
        model._no_split_modules or ()
    ):
        lists = [
            list(module)
            for module in model.modules()
            if isinstance(module, nn.ModuleList | nn.Sequential)
        ]
        alike = [blocks for blocks in lists if len({type(block) for block in blocks}) == 1]
        names = {
            type(blocks[0]).__name__
            for blocks in alike
            if any(True for block in blocks for _ in block.parameters())
        }
        model._no_split_modules = sorted(names)
    blocks = (
        module for module in model.modules() if type(module).__name__ in model._no_split_modules
    )
    if not of_text or model.get_input_embeddings() in {
        part for block in blocks for part in block.modules()
    }:
        model.get_input_embeddings = lambda: None
