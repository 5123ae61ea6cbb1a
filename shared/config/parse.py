"""Build one validated config, a frozen dataclass, from the command line and a YAML file.

A template's `Config` consists of groups (nested frozen dataclasses). On the command line and in
YAML, all fields are flat: `--learning_rate 1e-4`, `learning_rate: 1e-4`. Both are read as text for
each field. The command line overrides YAML. tyro builds the config from the text.
"""

import contextlib
import dataclasses
import difflib
import hashlib
import math
import operator
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from shared.process.errors import ConfigError, first_line
from shared.process.printing import quieten_imports
from shared.process.ranks import env_flag, is_main_rank
from shared.process.redaction import redact
from shared.process.signals import clean_exit, stop_on_signals_before_training
from shared.process.streams import outlive_readers

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


def require(config: Any, bounds: str, *names: str) -> None:
    """Check the ranges of fields: `require(self, "at least 0 and below 1", "adam_beta1")`. None is
    valid.

    Raises:
        ConfigError: names the flag, its bounds and its value.
    """
    for name in names:
        value = getattr(config, name)
        for bound in bounds.split(" and "):
            words, limit = bound.rsplit(maxsplit=1)
            if value is not None and not COMPARE[words](value, float(limit)):
                raise ConfigError(f"--{name} must be {bounds}, not {value}")


MODELS = {"model_name_or_path", "config_name", "model_preset"}
BUDGETS = {"max_steps", "num_train_epochs", "max_tokens"}
COMPARE = {
    "above": operator.gt,
    "at least": operator.ge,
    "below": operator.lt,
    "at most": operator.le,
}


def fields(config_class: type) -> Iterator[tuple[str, Any, str | None]]:
    """Yield (name, type, name of its group or None) for each field of a config class, including the
    fields of groups.
    """
    hints = get_type_hints(config_class, include_extras=True)
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if dataclasses.is_dataclass(bare):
            yield from ((name, kind, field.name) for name, kind, _ in fields(bare))  # type: ignore[arg-type]
        else:
            yield field.name, bare, None


def flatten(config: Any) -> dict[str, Any]:
    """All values of a config by flat field name, in types of YAML, so that `--config` can read them
    again.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, Path) else value

    return {
        name: plain(getattr(getattr(config, group) if group else config, name))
        for name, _, group in fields(type(config))
    }


def free_fields(config_class: type) -> frozenset[str]:
    """The fields that do not change what the model learns: those that the class and its groups list
    in `FREE`.
    """
    hints = get_type_hints(config_class)
    groups = [
        hints[field.name]
        for field in dataclasses.fields(config_class)
        if dataclasses.is_dataclass(hints[field.name])
    ]
    return frozenset().union(*(getattr(kind, "FREE", ()) for kind in (config_class, *groups)))


def measured_by(config: Any) -> str:
    """A digest of the settings of template, model and data, not its files: what an evaluation
    measures depends on them.
    """
    apart = {"batch", "optim", "speed", "evaluation", "checkpoint", "log"}
    free = free_fields(type(config)) - {"eval_samples"}
    values = flatten(config)
    # base is checked
    names = {name for name, _, group in fields(type(config)) if group not in apart} - free - MODELS
    return hashlib.sha256(
        repr(sorted((name, values[name]) for name in names)).encode()
    ).hexdigest()[:16]


def save(config: Any, path: Path) -> None:
    """Write every value of `config`, defaults included and secrets masked, as flat YAML. Call on
    one rank.
    """
    path.write_text(yaml.safe_dump(redact(flatten(config)), sort_keys=False), encoding="utf-8")


def replace(config: T, **changes: Any) -> T:
    """A copy of `config` with some flat fields changed."""
    group_of = {name: group for name, _, group in fields(type(config))}
    for name, value in changes.items():
        group = group_of[name]
        if group:
            value = dataclasses.replace(getattr(config, group), **{name: value})
        config = dataclasses.replace(config, **{group or name: value})  # type: ignore[type-var]
    return config


def cache_dir() -> Path:
    """Where prepared data is kept between runs: $TEMPLATES_CACHE, or below $XDG_CACHE_HOME or
    ~/.cache.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("TEMPLATES_CACHE") or os.path.join(base, "accelerate-templates"))


def parse_or_exit(config_class: type[T]) -> T:
    """`parse` for a script's first lines, before it imports torch, so that --help and errors appear
    at once.
    """
    outlive_readers()
    stop_on_signals_before_training()
    if env_flag("ACCELERATE_USE_CPU"):  # otherwise parts of torch would use a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    about = (sys.modules["__main__"].__doc__ or "").strip()
    names = {name for name, _, _ in fields(config_class)}
    about += "\n\nMost runs need no more than these; all are explained below:\n\n    "
    about += " ".join(f"--{name}" for name in MOST_USED if name in names)
    about += (
        "\n\n--config run.yaml takes flags from a file, without the dashes; the command line wins."
    )
    with clean_exit():
        _require_shared_beside(Path(getattr(sys.modules["__main__"], "__file__", None) or __file__))
        config = parse(config_class, description=about)
    with contextlib.suppress(OSError):  # where HOME is read-only, torch takes /tmp
        # Keep the cache of torch.compile after the job. By default it is in /tmp, and clusters
        # empty /tmp. `accelerate launch` has imported torch, which sets that default.
        compiled = cache_dir() / "inductor"
        compiled.mkdir(parents=True, exist_ok=True)
        if "/torchinductor_" in os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/torchinductor_"):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
    folder = flatten(config).get("output_dir")
    if folder and is_main_rank():
        with contextlib.suppress(OSError):
            Path(folder, "exit.json").unlink(missing_ok=True)  # from an earlier run
    return config


def _require_shared_beside(script: Path) -> None:
    """Refuse another checkout's `shared/`, which an editable install puts before the one beside the
    script.
    """
    used = Path(__file__).resolve().parents[2]
    root = next(
        (
            root
            for root in script.resolve().parents[:2]
            if (root / "shared/config/parse.py").is_file()
        ),
        used,
    )
    if root != used:
        raise ConfigError(
            f"{script} would run with {used}/shared: put "
            f"PYTHONPATH={shlex.quote(str(root))} before the command"
        )


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
            ill-formed YAML, or a value that its type or a group's `__post_init__` refuses.
        SystemExit: with code 0 after `--help`.
    """
    quieten_imports()
    tokens = list(sys.argv[1:] if argv is None else argv)
    kinds = {name: kind for name, kind, _ in fields(config_class)}
    if {"-h", "--help"} & set(tokens):
        return _build(config_class, ["--help"], description)
    given = _read_command_line(tokens, kinds)
    where: dict[str, str] = {}  # file and line of each value from YAML
    if path := given.pop("config", None):
        in_file, where = _read_yaml(Path(os.path.expanduser(path[-1])), kinds, only_known)
        # another budget of the command line replaces that of the file, too
        if BUDGETS & given.keys():
            in_file = {key: texts for key, texts in in_file.items() if key not in BUDGETS}
        where = {key: place for key, place in where.items() if key not in given}
        given = in_file | given
    try:
        args = [
            token for key, texts in given.items() for token in _as_tokens(key, kinds[key], texts)
        ]
        return _build(config_class, args, description)
    except ConfigError as error:
        flag = re.match(r"--(\w+)", str(error))
        if flag and flag[1] in where:
            raise ConfigError(f"{where[flag[1]]}: {error}") from None
        raise


def _build(config_class: type[T], args: list[str], description: str | None) -> T:
    import tyro  # here, since only parsing needs it

    return tyro.cli(
        config_class,
        args=args,
        description=description,
        use_underscores=True,
        console_outputs=is_main_rank(),
        config=(tyro.conf.OmitArgPrefixes,),  # flat names; one titled help box per group
    )


def _read_command_line(tokens: list[str], kinds: dict[str, Any]) -> dict[str, list[str]]:
    """The given values of each field, as text. A switch without a value is on."""
    given: dict[str, list[str]] = {}
    unknown: list[str] = []
    texts: list[str] | None = None
    for token in tokens:
        if not token.startswith("--"):
            if texts is None:
                raise ConfigError(f"{token!r} belongs to no flag; --help lists all")
            texts.append(token)
            continue
        flag, equals, text = token.partition("=")
        key = flag[2:].replace("-", "_")
        texts = [text] if equals else []
        if key.startswith("no_") and _is_switch(kinds.get(key[3:])):
            key = key[3:]
            texts = ["false", *texts]
        if key not in kinds and key != "config":
            unknown.append(f"{flag}{_suggest(key, kinds, '--')}")
        elif key in given and (key == "config" or get_origin(kinds[key]) is tuple):
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
        if _is_switch(kinds.get(key)):
            texts[:] = texts or ["true"]
        elif not texts:  # an unset variable in a script must not start the demo
            raise ConfigError(f"--{key} needs a value")
    return given


def _is_switch(kind: Any) -> bool:
    """A bool, also one that may be left open, or a choice that has on and off."""
    values = {kind, *get_args(kind)}
    return bool in values or {"on", "off"} <= values


def _read_yaml(
    path: Path, kinds: dict[str, Any], only_known: bool
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
        if key not in kinds:
            unknown.append(f"{place}: unknown key {key!r}{_suggest(key, kinds)}")
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
        if is_null and type(None) not in get_args(kinds[key]):
            raise ConfigError(f"{place}: {key} is empty")
        given[key] = ["None"] if is_null else [item.value for item in items]
        where[key] = place
    if unknown and not only_known:
        raise ConfigError("; ".join(unknown))
    return given, where


def _as_tokens(key: str, kind: Any, texts: list[str]) -> list[str]:
    """A field's given values as command line tokens for tyro.

    Raises:
        ConfigError: names the flag.
    """
    several = get_origin(kind) is tuple
    if not several and len(texts) != 1:
        raise ConfigError(f"--{key} takes one value, not {len(texts)}: {' '.join(texts)}")
    on = SWITCH.get(texts[0].lower()) if _is_switch(kind) else None
    if kind is bool or (bool in get_args(kind) and texts != ["None"]):
        if on is None:
            raise ConfigError(f"--{key} is true or false, not {texts[0]!r}")
        if kind is bool:
            return [f"--{key}" if on else f"--no_{key}"]
        texts = [str(on)]
    elif on is not None:
        texts = ["on" if on else "off"]
    texts = [_checked(key, kind, text) for text in texts]
    if several and any(text.startswith("-") for text in texts):
        raise ConfigError(
            f"--{key}: a value cannot begin with a dash, as {' '.join(texts)!r} "
            "does; ./-x is a file"
        )
    return [f"--{key}", *texts] if several else [f"--{key}={texts[0]}"]


SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _checked(key: str, kind: Any, text: str) -> str:
    """Check the text of one value. For an integer, 1e3 becomes 1000. In a path, ~ becomes the home
    folder.
    """
    types = {kind, *get_args(kind)}
    if not text:  # for example "$FILE" in a script that has not set FILE
        raise ConfigError(f"--{key} is given, but empty")
    if type(None) in types and text == "None":
        return text
    if get_origin(kind) is Literal and text not in types:
        raise ConfigError(f"--{key} is one of {', '.join(get_args(kind))}, not {text!r}")
    if types & {int, float}:
        with contextlib.suppress(ValueError):
            number = float(text)
            if int in types and number.is_integer() and abs(number) < 2**53:
                return str(int(number))
            if float in types and math.isfinite(number):
                return text
        raise ConfigError(f"--{key} is a {'' if float in types else 'whole '}number, not {text!r}")
    is_place = re.search(r"(dir|file|path|checkpoint|name)$", key)
    # shells do not expand ~ in YAML and after =
    return os.path.expanduser(text) if is_place else text


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


def _suggest(key: str, kinds: dict[str, Any], prefix: str = "") -> str:
    if key in ELSEWHERE:
        return f": {ELSEWHERE[key]}"
    near = difflib.get_close_matches(RENAMED.get(key, key), kinds, n=1, cutoff=0.71)
    return f": did you mean {prefix}{near[0]}?" if near else ""
