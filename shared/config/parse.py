"""Build one validated config, a frozen dataclass, from the command line and a YAML file.

A template's `Config` consists of groups (nested frozen dataclasses). On the command line and in
YAML, all fields are flat: `--learning_rate 1e-4`, `learning_rate: 1e-4`. Both are read as text for
each field. The command line overrides YAML. `Flag.value` turns text into a value and refuses what
the type does not allow; tyro prints --help.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import math
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml

from shared.config.types import FREE, Rule
from shared.process import start
from shared.process.errors import ConfigError, first_line
from shared.process.printing import quieten_imports
from shared.process.ranks import is_main_rank
from shared.process.redaction import redact
from shared.process.signals import clean_exit

T = TypeVar("T")


MOST_USED = (
    "model_name_or_path",
    "model_preset",
    "train_file",
    "train_dir",
    "dataset_name",
    "output_dir",
    "num_train_epochs",
    "max_tokens",
    "learning_rate",
    "global_batch_size",
    "per_device_train_batch_size",
    "seq_length",
    "image_size",
    "gradient_checkpointing",
)


MODELS = {"model_name_or_path", "config_name", "model_preset"}
BUDGETS = {"max_steps", "num_train_epochs", "max_tokens"}
SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A field of a config class or of one of its groups."""

    name: str
    group: str  # the field that it is in; empty: the config itself
    # of its type: plain types, the values of a choice, None, ... where it takes several, rules and
    # FREE
    parts: tuple[Any, ...]

    @property
    def is_switch(self) -> bool:
        """A bool, also one that may be left open, or a choice that has on and off."""
        return bool in self.parts or {"on", "off"}.issubset(self.choices)

    @property
    def choices(self) -> list[str]:
        return [part for part in self.parts if isinstance(part, str)]

    def value(self, texts: list[str]) -> Any:
        """The value that was given as text, on the command line or in YAML.

        Raises:
            ConfigError: names the flag.
        """
        several = ... in self.parts
        if not several and len(texts) != 1:
            raise ConfigError(f"--{self.name} takes one value, not {len(texts)}: {' '.join(texts)}")
        values = tuple(map(self._one, texts))
        if several and any(text.startswith("-") for text in texts):  # a mistyped flag
            raise ConfigError(
                f"--{self.name}: a value cannot begin with a dash, as {' '.join(texts)!r} "
                "does; ./-x is a file"
            )
        return values if several else values[0]

    def _one(self, text: str) -> Any:
        if not text:  # for example "$FILE" in a script that has not set FILE
            raise ConfigError(f"--{self.name} is given, but empty")
        if type(None) in self.parts and text == "None":
            return None
        value = self._converted(text)
        for rule in self.parts:
            if isinstance(rule, Rule) and not rule.holds(value):
                raise ConfigError(f"--{self.name} {rule.says}, not {value!r}")
        return value

    def _converted(self, text: str) -> Any:
        """For an integer, 1e3 is 1000. In a path, ~ is the home folder."""
        if self.is_switch and text.lower() in SWITCH:
            on = SWITCH[text.lower()]
            return on if bool in self.parts else "on" if on else "off"
        if bool in self.parts:
            raise ConfigError(f"--{self.name} is true or false, not {text!r}")
        if self.choices and text not in self.choices:
            raise ConfigError(f"--{self.name} is one of {', '.join(self.choices)}, not {text!r}")
        if {int, float}.intersection(self.parts):
            with contextlib.suppress(ValueError):
                number = float(text)
                if int in self.parts and number.is_integer() and abs(number) < 2**53:
                    return int(number)
                if float in self.parts and math.isfinite(number):
                    return number
            kind = "number" if float in self.parts else "whole number"
            raise ConfigError(f"--{self.name} is a {kind}, not {text!r}")
        # shells do not expand ~ in YAML and after =
        if re.search(r"(dir|file|path|checkpoint|name)$", self.name):
            text = os.path.expanduser(text)
        return Path(text) if Path in self.parts else text


def _parts(hint: Any) -> list[Any]:
    inner = get_args(hint)
    return [part for each in inner for part in _parts(each)] if inner else [hint]


def flags(config_class: type) -> dict[str, Flag]:
    """The fields of a config class by name, including those of its groups."""
    found: dict[str, Flag] = {}
    hints = get_type_hints(config_class, include_extras=True)
    for field in dataclasses.fields(config_class):
        parts = tuple(_parts(hints[field.name]))
        if isinstance(parts[0], type) and dataclasses.is_dataclass(parts[0]):
            for name, flag in flags(parts[0]).items():
                found[name] = dataclasses.replace(flag, group=field.name)
        else:
            found[field.name] = Flag(field.name, "", parts)
    return found


def flatten(config: Any) -> dict[str, Any]:
    """All values of a config by flat field name, in types of YAML, so that `--config` can read them
    again.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, Path) else value

    return {
        name: plain(getattr(getattr(config, flag.group) if flag.group else config, name))
        for name, flag in flags(type(config)).items()
    }


def free_fields(config_class: type) -> frozenset[str]:
    """The fields that do not change what the model learns."""
    return frozenset(name for name, flag in flags(config_class).items() if FREE in flag.parts)


def measured_by(config: Any) -> str:
    """A digest of the settings of template, model and data, not its files: what an evaluation
    measures depends on them.
    """
    apart = {"batch", "optim", "speed", "evaluation", "checkpoint", "log"}
    free = free_fields(type(config)) - {"eval_samples", "eval_answers", "max_new_tokens"}
    values = flatten(config)
    # base is checked
    names = {name for name, flag in flags(type(config)).items() if flag.group not in apart}
    names -= free | MODELS
    return hashlib.sha256(
        repr(sorted((name, values[name]) for name in names)).encode()
    ).hexdigest()[:16]


def save(config: Any, path: Path) -> None:
    """Write every value of `config`, defaults included and secrets masked, as flat YAML. Call on
    one rank.
    """
    path.write_text(yaml.safe_dump(redact(flatten(config)), sort_keys=False), encoding="utf-8")


def replace(config: T, **changes: Any) -> T:
    """A copy with some flat fields changed."""
    return _with(changes, config, partial(dataclasses.replace, config))  # type: ignore[type-var]


def _with(changes: dict[str, Any], base: Any, make: Any) -> Any:
    """What `make` makes of the changed fields and groups. Unchanged fields of groups are those of
    `base`, a config or its class.
    """
    known = flags(base if isinstance(base, type) else type(base))
    by_group: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        by_group.setdefault(known[name].group, {})[name] = value
    own = by_group.pop("", {})
    return make(
        **own,
        **{
            group: dataclasses.replace(getattr(base, group), **values)
            for group, values in by_group.items()
        },
    )


def parse_or_exit(config_class: type[T]) -> T:
    """`parse` for a script's first lines, before it imports torch, so that --help and errors appear
    at once.
    """
    start.begin()
    about = (sys.modules["__main__"].__doc__ or "").strip()
    about += "\n\nMost runs need no more than these; all are explained below:\n\n    "
    about += " ".join(f"--{name}" for name in MOST_USED if name in flags(config_class))
    about += (
        "\n\n--config run.yaml takes flags from a file, without the dashes; the command line wins."
    )
    with clean_exit():
        script = getattr(sys.modules["__main__"], "__file__", None) or __file__
        start.require_shared_beside(Path(script))
        config = parse(config_class, description=about)
    start.keep_compiled()
    folder = flatten(config).get("output_dir")
    if folder and is_main_rank():
        with contextlib.suppress(OSError):
            Path(folder, "exit.json").unlink(missing_ok=True)  # from an earlier run
    return config


def parse(
    config_class: type[T],
    argv: Sequence[str] | None = None,
    *,
    description: str | None = None,
    only_known: bool = False,
) -> T:
    """Parse the command line, and the YAML file that `--config` names, into a `config_class`.

    Every rank calls this; only the main one prints.

    Args:
        only_known: read of the file only what `config_class` has: it is of another program.

    Raises:
        ConfigError: unknown flag or key (the error suggests a similar one), unreadable or
            ill-formed YAML, or a value that its `Flag` or a group's `__post_init__` refuses.
        SystemExit: with code 0 after `--help`.
    """
    quieten_imports()
    tokens = list(sys.argv[1:] if argv is None else argv)
    known_flags = flags(config_class)
    if {"-h", "--help"} & set(tokens):
        _print_help(config_class, description)
    given = _read_command_line(tokens, known_flags)
    where: dict[str, str] = {}  # file and line of each value from YAML
    if path := given.pop("config", None):
        in_file, where = _read_yaml(Path(os.path.expanduser(path[-1])), known_flags, only_known)
        # another budget of the command line replaces that of the file, too
        if BUDGETS & given.keys():
            in_file = {key: texts for key, texts in in_file.items() if key not in BUDGETS}
        where = {key: place for key, place in where.items() if key not in given}
        given = in_file | given
    try:
        values = {key: known_flags[key].value(texts) for key, texts in given.items()}
        return _with(values, config_class, config_class)  # type: ignore[no-any-return]
    except ConfigError as error:
        flag = re.match(r"--(\w+)", str(error))
        if flag and flag[1] in where:
            raise ConfigError(f"{where[flag[1]]}: {error}") from None
        raise


def _print_help(config_class: type, description: str | None) -> None:
    import tyro  # here, since only --help needs it

    tyro.cli(
        config_class,
        args=["--help"],
        description=description,
        use_underscores=True,
        console_outputs=is_main_rank(),
        config=(tyro.conf.OmitArgPrefixes,),  # flat names; one titled help box per group
    )


def _read_command_line(tokens: list[str], known_flags: dict[str, Flag]) -> dict[str, list[str]]:
    """The given values of each field, as text. A switch without a value is on."""
    given: dict[str, list[str]] = {}
    unknown: list[str] = []
    texts: list[str] | None = None
    switches = {name for name, flag in known_flags.items() if flag.is_switch}
    for token in tokens:
        if not token.startswith("--"):
            if texts is None:
                raise ConfigError(f"{token!r} belongs to no flag; --help lists all")
            texts.append(token)
            continue
        flag, equals, text = token.partition("=")
        key = flag[2:].replace("-", "_")
        texts = [text] if equals else []
        if key.startswith("no_") and key[3:] in switches:
            key = key[3:]
            texts = ["false", *texts]
        if key not in known_flags and key != "config":
            unknown.append(f"{flag}{_suggest(key, known_flags, '--')}")
        elif key in given and (key == "config" or ... in known_flags[key].parts):
            raise ConfigError(f"{flag} is given twice: give all of its values after one")
        given[key] = texts
    if unknown:
        strange = any(": " not in flag for flag in unknown)
        where = (
            "--help lists all"
            + "; docs/coming_from.md has those of Trainer, TRL, timm and others" * strange
        )
        raise ConfigError(f"unknown flag{'s' * (len(unknown) > 1)} {'; '.join(unknown)}; {where}")
    for key, texts in given.items():
        if key in switches:
            texts[:] = texts or ["true"]
        elif not texts:  # an unset variable in a script must not start the demo
            raise ConfigError(f"--{key} needs a value")
    return given


def _read_yaml(
    path: Path, known_flags: dict[str, Flag], only_known: bool
) -> tuple[dict[str, list[str]], dict[str, str]]:
    """The values of each key of a YAML file as text, and the file and line of each key. YAML tags
    create no objects.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(
            f"{path}{f':{mark.line + 1}' if mark else ''}: not valid YAML ({problem})"
        ) from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected 'key: value' lines")
    given: dict[str, list[str]] = {}
    where: dict[str, str] = {}
    unknown: list[str] = []
    for name, node in root.value if root else ():
        key = str(name.value).replace("-", "_")
        place = f"{path}:{name.start_mark.line + 1}"
        if key not in known_flags:
            unknown.append(f"{place}: unknown key {key!r}{_suggest(key, known_flags)}")
            continue
        if key in given:
            raise ConfigError(f"{place}: the key {key!r} is there twice")
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        known = all(item.tag in yaml.SafeLoader.yaml_constructors for item in (node, *items))
        if not known or not all(isinstance(item, yaml.ScalarNode) for item in items):
            raise ConfigError(
                f"{place}: {key}: expected a value or a list of values; keys "
                "are flat, as the flags are"
            )
        is_null = node.tag.endswith(":null")
        if is_null and type(None) not in known_flags[key].parts:
            raise ConfigError(f"{place}: {key} is empty")
        given[key] = ["None"] if is_null else [item.value for item in items]
        where[key] = place
    if unknown and not only_known:
        raise ConfigError("; ".join(unknown))
    return given, where


# Names of flags in other programs, and flags that are set elsewhere.
RENAMED = {
    **dict.fromkeys(("micro_batch_size", "per_device_batch_size"), "per_device_train_batch_size"),
    **dict.fromkeys(("epochs", "num_epochs"), "num_train_epochs"),
    "lr": "learning_rate",
    "batch_size": "global_batch_size",
    "model": "model_name_or_path",
    "block_size": "seq_length",
    "max_length": "seq_length",
    "workers": "dataloader_num_workers",
    "label_smoothing_factor": "label_smoothing",
    **dict.fromkeys(("eval_file", "val_file"), "validation_file"),
    **dict.fromkeys(("eval_dir", "val_dir"), "validation_dir"),
    "mixup": "mixup_alpha",
    "cutmix": "cutmix_alpha",
    "reprob": "random_erasing",
    "aa": "auto_augment",
    **dict.fromkeys(("model_ema", "model_ema_decay"), "ema_decay"),
    **dict.fromkeys(("data_dir", "data"), "train_dir"),
}
ELSEWHERE = {
    "overwrite_output_dir": "a run continues in its --output_dir; a new run takes another",
    "load_best_model_at_end": (
        "final/ is the best by --metric_for_best_model, or the last weights with none"
    ),
    "push_to_hub": "after training, `hf upload`",
    "group_by_length": "where samples are padded, they are grouped by length",
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), "give --eval_steps"),
    "save_strategy": "give --save_steps",
    "test_file": "after training, `python -m shared evaluate RUN --test_file`",
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss"),
        "give --loss_on assistant, which is the default",
    ),
    "neftune_noise_alpha": "full_finetune.py has it",
    "warmup_ratio": "give --warmup_steps, which takes a share of the run, too",
    "gradient_accumulation_steps": (
        "it follows from --global_batch_size and --per_device_train_batch_size"
    ),
    **dict.fromkeys(
        ("bf16", "fp16", "mixed_precision"),
        "precision is the launcher's: accelerate launch --mixed_precision",
    ),
}


def _suggest(key: str, known_flags: dict[str, Flag], prefix: str = "") -> str:
    if key in ELSEWHERE:
        return f": {ELSEWHERE[key]}"
    near = difflib.get_close_matches(RENAMED.get(key, key), known_flags, n=1, cutoff=0.71)
    return f": did you mean {prefix}{near[0]}?" if near else ""
