"""A frozen dataclass, a YAML file and the command line become one validated config.

A template composes its `Config` from groups (nested frozen dataclasses); on the command line and in YAML all
fields are flat: `--learning_rate 1e-4`, `learning_rate: 1e-4`. The YAML is turned into command-line tokens placed
before the user's own, so one parser types everything and the command line wins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import logging
import math
import os
import re
import reprlib
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from decimal import Decimal, InvalidOperation
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from shared.process.errors import ConfigError, first_line
from shared.process.printing import redact
from shared.process.ranks import env_flag, is_main_rank
from shared.process.signals import (
    STOP_SIGNALS,
    _be_told_of_signals,
    _stop_before_the_start,
    clean_exit,
    end_with_the_launcher,
)
from shared.process.streams import outlive_readers

T = TypeVar("T")


def require_at_least_one(config: Any, *names: str) -> None:
    """Raise a ConfigError that names the flag where one of these fields is below 1; None is not given."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < 1:
            raise ConfigError(f"--{name} must be at least 1, not {value}")


def fields(config_class: type) -> Iterator[tuple[str, Any, str | None]]:
    """Yield (field name, type, name of the group that holds it or None) of a config class, groups flattened."""
    hints = get_type_hints(config_class, include_extras=True)
    for field in dataclasses.fields(config_class):
        hint = hints[field.name]
        bare = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if dataclasses.is_dataclass(bare):
            yield from ((name, kind, field.name) for name, kind, _ in fields(bare))  # type: ignore[arg-type]
        else:
            yield field.name, bare, None


def flatten(config: Any) -> dict[str, Any]:
    """All values of a config by flat field name, in YAML's types, as `--config` accepts them back."""

    def plain(value: Any) -> Any:
        if isinstance(value, tuple):
            return [plain(v) for v in value]
        return str(value) if isinstance(value, Path) else value

    return {
        name: plain(getattr(getattr(config, group) if group else config, name)) for name, _, group in fields(type(config))
    }


def free_fields(config_class: type) -> frozenset[str]:
    """The fields whose value does not change what is learned: those that the class and its groups list in `FREE`."""
    hints = get_type_hints(config_class)
    groups = [hints[field.name] for field in dataclasses.fields(config_class) if dataclasses.is_dataclass(hints[field.name])]
    return frozenset().union(*(getattr(kind, "FREE", ()) for kind in (config_class, *groups)))


def save(config: Any, path: Path) -> None:
    """Write every value of `config`, defaults included and secrets masked, as flat YAML. Call on one rank."""
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


def parse(config_class: type[T], argv: Sequence[str] | None = None, *, description: str | None = None) -> T:
    """Parse the command line, and the YAML file that `--config` names, into a `config_class`.

    Every rank calls this; only the main one prints.

    Raises:
        ConfigError: unknown flag or key (the near one is suggested), unreadable or ill-formed YAML, or a value
            that a group's `__post_init__` refuses.
        SystemExit: with code 0 after `--help`.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    kinds = {name: kind for name, kind, _ in fields(config_class)}
    if {"-h", "--help"} & set(tokens):
        return _typed(config_class, ["--help"], description)
    tokens, yaml_path = _take_config_flag(tokens)
    tokens = _normalise(tokens, kinds)
    given = {_key(token) for token in tokens if token.startswith("--")}
    given |= {key.removeprefix("no_") for key in given}
    if yaml_path is not None:
        tokens = [
            t for key, value in _read_yaml(yaml_path, kinds) if key not in given for t in _as_tokens(key, value)
        ] + tokens
    return _typed(config_class, tokens, description)


def cache_dir() -> Path:
    """Where prepared data is kept between runs: $TEMPLATES_CACHE, or below $XDG_CACHE_HOME or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("TEMPLATES_CACHE") or os.path.join(base, "accelerate-templates"))


def parse_or_exit(config_class: type[T]) -> T:
    """`parse` for a script's first lines, before torch is imported: --help and mistakes answer at once."""
    end_with_the_launcher()
    outlive_readers()
    # What torch.compile makes outlives the job here; by default it lies below /tmp, which clusters empty.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))
    if env_flag("ACCELERATE_USE_CPU"):  # a GPU that is there nonetheless would be found by parts of torch, and used
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # On newer CPUs it asks, when it is imported, for a package that is not needed.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    for number in STOP_SIGNALS:
        signal.signal(number, _stop_before_the_start)
    _be_told_of_signals()
    with clean_exit():
        about = (sys.modules["__main__"].__doc__ or "").strip()
        config = parse(
            config_class,
            description=f"{about}\n\n--config run.yaml takes flags from a file, without the dashes; the command line wins.",
        )
    folder = flatten(config).get("output_dir")
    if folder and is_main_rank():
        with contextlib.suppress(OSError):
            Path(folder, "exit.json").unlink(missing_ok=True)  # of an earlier end
    return config


def _typed(config_class: type[T], tokens: list[str], description: str | None) -> T:
    wants_help = "--help" in tokens
    import tyro  # not by those who parse nothing

    report = io.StringIO()
    config: T
    try:
        # tyro draws its errors as boxes, once per rank; they are kept back and become one line instead.
        with contextlib.nullcontext() if wants_help else contextlib.redirect_stderr(report):
            config = tyro.cli(
                config_class,
                args=tokens,
                description=description,
                use_underscores=True,
                console_outputs=is_main_rank(),
                config=(tyro.conf.OmitArgPrefixes,),  # flat names, one titled box of help a group
            )
    except SystemExit as exit:
        if exit.code in (0, None):
            raise
    else:
        for name, value in flatten(config).items():
            endless = name == "max_grad_norm" and value == math.inf  # as good a word for no clipping as 0
            if isinstance(value, float) and not math.isfinite(value) and not endless:
                raise ConfigError(f"--{name} is {value}, with which nothing can be computed")
        return config
    text = " ".join(line.strip(" │╭╮╰╯─") for line in report.getvalue().splitlines())
    text = re.split(r" Argument helptext:| ─{3,}| For full helptext", " ".join(text.split()))[0]
    text = re.sub(r"^(Parsing error|Value error|Invalid choice|Unrecognized options|Missing value)s? (?=\S)", "", text)
    raise ConfigError(text or f"the command line could not be read: {' '.join(tokens)}")


def _key(token: str) -> str:
    return token.lstrip("-").split("=", 1)[0].replace("-", "_")


def _take_config_flag(tokens: list[str]) -> tuple[list[str], Path | None]:
    if sum(token.partition("=")[0] == "--config" for token in tokens) > 1:
        raise ConfigError("--config is given twice: put all into one file")
    for i, token in enumerate(tokens):
        if token == "--config":
            if not "".join(tokens[i + 1 : i + 2]) or tokens[i + 1].startswith("--"):
                raise ConfigError("--config needs the path of a YAML file")
            return tokens[:i] + tokens[i + 2 :], Path(tokens[i + 1]).expanduser()
        if token.startswith("--config="):
            return tokens[:i] + tokens[i + 1 :], Path(token.split("=", 1)[1]).expanduser()
    return tokens, None


def _normalise(tokens: list[str], kinds: dict[str, Any]) -> list[str]:
    """Tokens as the parser takes them: `--key=value`, `--key value value` for lists, `--key` and `--no_key` for switches.

    Raises:
        ConfigError: an unknown flag (the near one is named), a value that is missing, too much or of another kind.
    """
    result: list[str] = []
    lists: set[str] = set()  # flags of several values that were given
    rest = list(reversed(tokens))

    def follows() -> bool:  # a value, which may begin with a dash, as -1 does
        return bool(rest) and not rest[-1].startswith("--") and not (rest[-1].startswith("-") and _key(rest[-1]) in kinds)

    while rest:
        token = rest.pop()
        if not token.startswith("--"):
            raise ConfigError(f"{token!r} belongs to no flag; --help lists all")
        name, equals, value = token.partition("=")
        key = _key(name)
        negated = key.startswith("no_") and kinds.get(key[3:]) is bool
        if key not in kinds and not negated:
            raise ConfigError(f"unknown flag {name}{_suggest(key, kinds, '--')}; --help lists all")
        if negated or kinds[key] is bool:
            following = rest[-1] if rest and not rest[-1].startswith("-") else ""
            if negated and (equals or following):
                raise ConfigError(f"{token if equals else f'{name} {following}'}: {name} takes no value")
            if not equals and following.lower() in ("true", "false"):
                value = rest.pop()
            elif not equals and following:
                raise ConfigError(f"{name} {following}: it is true or false")
            if equals and value.lower() not in ("true", "false"):
                raise ConfigError(f"{name} is true or false, not {value!r}")
            result += [f"--{key}"] if negated else _as_tokens(key, value.lower() != "false")
            continue
        values = [value] if equals else []
        several = get_origin(kinds[key]) is tuple
        while (several or not values) and follows():
            values.append(rest.pop())
        # A variable of a script that is not set must not train the demo; in place of a file's list there may be none.
        instead = {_key(other) for other in tokens} & {"dataset_name", "train_dir"}
        if not values and (not several or (key == "train_file" and not instead)):
            raise ConfigError(f"{name} needs a value" + (f", which {rest[-1]} is not; {name}=... takes any" if rest else ""))
        if several and key in lists:
            raise ConfigError(f"{name} is given twice: give all of its values after one")
        lists.add(key)
        values = [_of_kind(kinds[key], value, name, key) for value in values]
        result += [f"--{key}", *values] if several else [f"--{key}={values[0]}"]
    return result


def _of_kind(kind: Any, text: str, where: str, key: str) -> str:
    """The text of one value of `key`, whole numbers written out (1e9, too), ~ expanded. `where` is for messages.

    Raises:
        ConfigError: what is expected instead.
    """
    inner = set(get_args(kind)) - {Ellipsis, type(None)}
    several = get_origin(kind) is tuple
    kinds = inner if several or get_origin(kind) in (Union, UnionType) else {kind}
    is_place = re.search(r"(dir|file|path|checkpoint|config_name|tokenizer_name|dataset_name|split_name)$", key)
    if not text and (several or is_place):  # a variable of a script that is not set
        raise ConfigError(f"{where} is given, but empty")
    if several and text.startswith("-"):
        raise ConfigError(f"{where}: a value that begins with a dash, as {text!r}, would be a flag; ./{text} is a file")
    if several and "," in text and not set("*?[") & set(text) and not os.path.exists(os.path.expanduser(text)):
        raise ConfigError(f"{where}: {text!r}: several values have spaces between them (lines of a list in YAML), no commas")
    if is_place:
        return os.path.expanduser(text)  # which shells do not do in YAML and after =
    if len(kinds) != 1 or (type(None) in get_args(kind) and text == "None"):
        return text
    (kind,) = kinds
    if get_origin(kind) is Literal and text not in get_args(kind):
        raise ConfigError(f"{where} is one of {', '.join(get_args(kind))}, not {text!r}")
    if kind not in (int, float):
        return text
    try:
        if kind is float:
            return repr(float(text))
        number = Decimal(text)
        if number.is_finite() and number == number.to_integral_value() and number.adjusted() < 19:
            return str(int(number))
    except (ValueError, InvalidOperation):
        pass
    raise ConfigError(f"{where} is a {'whole ' if kind is int else ''}number, not {text!r}")


# What is called otherwise elsewhere, and what is decided otherwise here.
ELSEWHERE = {
    **dict.fromkeys(("micro_batch_size", "per_device_batch_size"), "did you mean {}per_device_train_batch_size?"),
    "model": "did you mean {}model_name_or_path?",
    "workers": "did you mean {}dataloader_num_workers?",
    "overwrite_output_dir": "a run goes on in its {}output_dir; a new run takes another",
    "lr": "did you mean {}learning_rate?",
    "batch_size": "did you mean {}global_batch_size?",
    "epochs": "did you mean {}num_train_epochs?",
    "num_epochs": "did you mean {}num_train_epochs?",
    "gradient_accumulation_steps": "it follows from {}global_batch_size and {}per_device_train_batch_size",
    **dict.fromkeys(("bf16", "fp16", "mixed_precision"), "precision is the launcher's: accelerate launch --mixed_precision"),
}


def _suggest(key: str, kinds: dict[str, Any], prefix: str = "") -> str:
    if key in ELSEWHERE and "global_batch_size" in kinds:
        return ": " + ELSEWHERE[key].replace("{}", prefix)
    near = difflib.get_close_matches(key, list(kinds), n=1, cutoff=0.6)
    return f": did you mean {prefix}{near[0]}?" if near else ""


def _read_yaml(path: Path, kinds: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
        root, content = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{where}: not valid YAML ({getattr(error, 'problem', None) or first_line(error)})") from None
    if content is None:
        return
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected 'key: value' lines, found a {type(content).__name__}")
    lines: dict[str, int] = {}
    assert isinstance(root, yaml.MappingNode)
    for node, _ in root.value:
        key = str(node.value).replace("-", "_")
        line = node.start_mark.line + 1
        if key in lines:  # YAML's loader would keep the last one in silence
            raise ConfigError(f"{path}:{line}: the key {key!r} is there twice")
        lines[key] = line
    for raw, value in content.items():
        key = str(raw).replace("-", "_")
        where = f"{path}:{lines[key]}" if key in lines else str(path)  # a merged one stands elsewhere
        if key not in kinds:
            raise ConfigError(f"{where}: unknown key {raw!r}{_suggest(key, kinds)}")
        if isinstance(value, dict):
            raise ConfigError(f"{where}: {raw}: expected a value, found a mapping (keys are flat, as the flags are)")
        if not all(isinstance(v, str | int | float | date) for v in (value if isinstance(value, list) else [value or ""])):
            raise ConfigError(f"{where}: {raw}: expected text, a number, true or false, or a list of them")
        if kinds[key] is bool and not isinstance(value, bool):
            raise ConfigError(f"{where}: {raw} is true or false, not {reprlib.repr(value)}")
        if isinstance(value, list) and get_origin(kinds[key]) is not tuple:
            raise ConfigError(f"{where}: {raw} has one value, not a list of them")
        if isinstance(value, bool) and {int, float} & {kinds[key], *get_args(kinds[key])}:
            raise ConfigError(f"{where}: {raw} is a number, not {str(value).lower()}")
        if kinds[key] is not bool and any(isinstance(v, bool) for v in (value if isinstance(value, list) else [value])):
            raise ConfigError(
                f"{where}: {raw}: YAML reads yes, no, on and off as true or false: put such a word into quotes"
            )
        if value is None and type(None) not in get_args(kinds[key]):
            raise ConfigError(f"{where}: {raw} is empty")
        if isinstance(value, list):
            value = [_of_kind(kinds[key], str(v), f"{where}: {raw}", key) for v in value]
        elif value is not None and not isinstance(value, bool):
            value = _of_kind(kinds[key], str(value), f"{where}: {raw}", key)
        yield key, value


def _as_tokens(key: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{key}" if value else f"--no_{key}"]
    if isinstance(value, list):
        return [f"--{key}", *map(str, value)]
    return [f"--{key}={value}"]
