"""What goes with what: templates, launch configs and features. docs/support.md shows it, `plan` refuses it.

python -m tools.support > docs/support.md      # make the page anew

Written down is what does not work, with the line that a run ends with. tests/test_support.py launches every cell.
"""

import re
from collections.abc import Iterable

LAUNCHES = (
    *("ddp", "fsdp2", "fsdp2_offload", "hsdp", "tensor_parallel", "fsdp2_tensor_parallel"),
    *("sequence_parallel", "fsdp2_sequence_parallel"),
    *("deepspeed_zero2", "deepspeed_zero3", "deepspeed_zero3_offload"),
)
TEMPLATES = (
    *("lora_finetune", "full_finetune", "dpo", "grpo", "distill", "text_classification"),
    *("token_classification", "image_classification", "pretrain", "pretrain_pipeline"),
)
# feature: (how it is asked for, the templates that have it)
FEATURES = {
    "packing": (
        "`--packing`; in pretraining always",
        ("lora_finetune", "full_finetune", "dpo", "distill", "pretrain", "pretrain_pipeline"),
    ),
    "compile": ("`--torch_compile`", TEMPLATES),
    "4 bits": ("`--load_in_4bit`", ("lora_finetune", "dpo", "grpo", "distill")),
    "images": (
        "in the data",
        ("lora_finetune", "full_finetune", "dpo", "grpo", "image_classification"),
    ),
    "streaming": ("`--streaming`", ("lora_finetune", "full_finetune", "distill", "pretrain")),
    "EMA": ("`--ema_decay`", TEMPLATES[:-1]),  # no pipeline
    "mixtures": ("`--mix_weights`", TEMPLATES),
}
CANNOT_SHARE = "this template cannot divide rows over GPUs"
# (template, pattern of launch configs): the line
NO_LAUNCH = {
    ("grpo", "sequence"): CANNOT_SHARE,
    ("text_classification", "sequence"): CANNOT_SHARE,
    ("token_classification", "sequence"): CANNOT_SHARE,
    ("image_classification", "sequence"): CANNOT_SHARE,
    ("image_classification", "tensor"): "cannot be tensor parallel here",
    ("pretrain_pipeline", "sequence"): CANNOT_SHARE,
    ("pretrain_pipeline", "fsdp2|hsdp|tensor|deepspeed"): "a pipeline is launched with ddp.yaml",
}
# (feature, pattern of launch configs): the line
NO_FEATURE = {
    ("4 bits", "tensor"): "tensor parallelism cannot cut quantised weights",
    ("images", "sequence"): "ranks cannot share rows with images",
    ("EMA", "deepspeed"): "--ema_decay does not work with DeepSpeed",
}


def refusal(template: str = "", launch: str = "", features: Iterable[str] = ()) -> str:
    """The line that such a run ends with; empty if it works. What is empty is not asked about."""
    for (name, pattern), line in NO_LAUNCH.items():
        if name == template and launch and re.search(pattern, launch):
            return line
    for feature in features:
        for (name, pattern), line in NO_FEATURE.items():
            if name == feature and launch and re.search(pattern, launch):
                return line
        if template and template not in FEATURES[feature][1]:
            return f"{template}.py has no {feature}"
    return ""


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    cells = [[*head], *map(list, rows)]
    cells.insert(1, ["---"] * len(cells[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def page() -> str:
    """docs/support.md."""
    lines = list(dict.fromkeys([*NO_LAUNCH.values(), *NO_FEATURE.values()]))

    def cell(**asked: Iterable[str]) -> str:
        line = refusal(**asked)  # type: ignore[arg-type]
        return f"**no** ({lines.index(line) + 1})" if line in lines else "**no**" if line else "yes"

    of_launches = (
        [f"`{launch}`", *(cell(template=name, launch=launch) for name in TEMPLATES)]
        for launch in LAUNCHES
    )
    of_features = (
        [f"`{launch}`", *(cell(launch=launch, features=[feature]) for feature in FEATURES)]
        for launch in LAUNCHES
    )
    of_templates = (
        [f"`{name}`", *(cell(template=name, features=[feature]) for feature in FEATURES)]
        for name in TEMPLATES
    )
    numbered = "\n".join(f"{number}. `{line}`" for number, line in enumerate(lines, 1))
    asked = ", ".join(f"{feature} ({how})" for feature, (how, _) in FEATURES.items())
    return f"""# What goes with what

<!-- made by python -m tools.support -->

Each cell of these tables is launched by a test, on CPU processes. **yes**: it trains, and where the table says so learns what one
process learns. **no**: the run ends at once, with the line of that number. A run works if all of its pairs say yes.
`python -m shared plan` refuses what says no.

## Templates and launch configs

Small demos, two steps, on two or four processes
([test_every_template_trains_or_ends_with_its_line](../tests/test_support.py)). That a launch learns what one process learns is in
tests/promises, for each template.

{table(["", *(name.removeprefix("pretrain_").split("_")[0] for name in TEMPLATES)], of_launches)}

All train on one device too, but for `pretrain_pipeline`; `fp8` is for language models on GPUs that have it.

## Features and launch configs

With lora_finetune.py: the losses of three steps and of the evaluation are those of one process
([test_every_feature_learns_what_one_process_learns_or_ends_with_its_line](../tests/test_support.py)).

{table(["", *FEATURES], of_features)}

Asked for by: {asked}. Sequence parallelism is a launch config, `sequence_parallel`.

## Templates and features

As the templates' flags say ([test_the_table_is_that_of_the_flags](../tests/test_support.py)).

{table(["", *FEATURES], of_templates)}

## The lines

{numbered}

Features exclude each other in few places: `--streaming` goes with neither packing, mixtures nor images in conversations, and
conversations with images are not packed. [Known limits](known_limits.md) has the rest.
"""


if __name__ == "__main__":
    print(page(), end="")
