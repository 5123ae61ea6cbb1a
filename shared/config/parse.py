"""Build one validated config, a frozen dataclass, from the command line and a YAML file.

A template's `Config` consists of groups (nested frozen dataclasses). On the command line and in
YAML, all fields are flat: `--learning_rate 1e-4`, `learning_rate: 1e-4`. Both are read as text for
each field. The command line overrides YAML. `Flag.value` turns text into a value and refuses what
the type does not allow; tyro prints --help.
"""

import contextlib
import dataclasses
import difflib
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import yaml

from shared.config.types import FREE, Rule
from shared.process import start
from shared.process.errors import ConfigError, first_line
from shared.process.printing import print_main, quieten_imports
from shared.process.ranks import is_main_rank
from shared.process.redaction import redact
from shared.process.signals import clean_exit

T = TypeVar("T")


# What --help shows; --help all has the others, too.
USUAL = """
model_name_or_path model_preset config_overrides teacher_name_or_path
train_file train_dir validation_file dataset_name text_column label_column preprocess_only packing
output_dir report_to save_steps eval_steps eval_answers show_answers max_new_tokens
num_train_epochs max_steps max_tokens learning_rate global_batch_size per_device_train_batch_size
seq_length image_size gradient_checkpointing torch_compile
lora_r lora_alpha load_in_4bit merge_adapter weights_dtype full
objective loss_type beta group_size on_policy class_weights freeze_backbone pipeline_ranks
""".split()  # noqa: SIM905

HELP = {"-h", "--help"}
CONFIG = "--config run.yaml takes flags from a file, without the dashes; the command line wins."

MODELS = {"model_name_or_path", "config_name", "model_preset"}
BUDGETS = {"max_steps", "num_train_epochs", "max_tokens"}


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
        return bool in self.parts or {"on", "off"}.issubset(self.parts)

    def value(self, texts: list[str]) -> Any:
        """The value that was given as text, on the command line or in YAML.

        Raises:
            ConfigError: names the flag.
        """
        values = tuple(map(self._one, texts))
        if ... in self.parts:
            for text in texts:
                if text.startswith("-"):
                    raise ConfigError(f"--{self.name} {text}: flags begin with --; ./-x is a file")
            return values
        if len(values) != 1:
            words = " ".join(texts)
            raise ConfigError(f"--{self.name} takes one value, not {len(texts)}: {words}")
        return values[0]

    def _one(self, text: str) -> Any:
        if not text:  # for example "$FILE" in a script that has not set FILE
            raise ConfigError(f"--{self.name} is empty")
        if type(None) in self.parts and text == "None":
            return None
        value = self._converted(text)
        for rule in self.parts:
            if isinstance(rule, Rule) and not rule.holds(value):
                raise ConfigError(f"--{self.name} {rule.says}, not {value!r}")
        return value

    def _converted(self, text: str) -> Any:
        """For an integer, 1e3 is 1000. In a path, ~ is the home folder."""
        on = yaml.SafeLoader.bool_values.get(text.lower())  # of true, yes, on, false, no, off
        if self.is_switch and on is not None:
            return on if bool in self.parts else "on" if on else "off"
        if bool in self.parts:
            raise ConfigError(f"--{self.name} is true or false, not {text!r}")
        choices = [part for part in self.parts if isinstance(part, str)]
        if choices and text not in choices:
            raise ConfigError(f"--{self.name} is one of {', '.join(choices)}, not {text!r}")
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


def _parts(hint: Any) -> tuple[Any, ...]:
    inner = get_args(hint)
    return tuple(part for each in inner for part in _parts(each)) if inner else (hint,)


def flags(config_class: type, group: str = "") -> dict[str, Flag]:
    """The fields of a config class by name, including those of its groups."""
    by_name: dict[str, Flag] = {}
    hints = get_type_hints(config_class, include_extras=True)
    for field in dataclasses.fields(config_class):
        parts = _parts(hints[field.name])
        if dataclasses.is_dataclass(parts[0]):
            by_name |= flags(parts[0], field.name)  # type: ignore[arg-type]
        else:
            by_name[field.name] = Flag(field.name, group, parts)
    return by_name


def flatten(config: Any) -> dict[str, Any]:
    """All values of a config by flat field name, in types of YAML, so that `--config` can read them
    again.
    """
    values: dict[str, Any] = {}
    for name, value in dataclasses.asdict(config).items():
        values |= value if isinstance(value, dict) else {name: value}
    return dict(json.loads(json.dumps(values, default=str)))


def free_fields(config_class: type) -> frozenset[str]:
    """The fields that do not change what the model learns."""
    return frozenset(name for name, flag in flags(config_class).items() if FREE in flag.parts)


def save(config: Any, path: Path) -> None:
    """Write every value of `config`, defaults included and secrets masked, as flat YAML. Call on
    one rank.
    """
    path.write_text(yaml.safe_dump(redact(flatten(config)), sort_keys=False), encoding="utf-8")


def replace(config: T, **changes: Any) -> T:
    """A copy with some flat fields changed."""
    return dataclasses.replace(config, **_nested(changes, config))  # type: ignore[type-var]


def _nested(changes: dict[str, Any], base: Any) -> dict[str, Any]:
    """The changed fields of `base`, a config or its class; groups with a changed field whole."""
    nested: dict[str, Any] = {}
    for field in dataclasses.fields(base):
        group: Any = getattr(base, field.name, None)
        if dataclasses.is_dataclass(group):
            inner = changes.keys() & group.__dataclass_fields__.keys()
            if inner:
                values = {name: changes[name] for name in inner}
                nested[field.name] = dataclasses.replace(group, **values)  # type: ignore[type-var]
        elif field.name in changes:
            nested[field.name] = changes[field.name]
    return nested


def parse_or_exit(config_class: type[T]) -> T:
    """`parse` for a script's first lines, before it imports torch, so that --help and errors appear
    at once.
    """
    start.begin()
    about = f"{(sys.modules['__main__'].__doc__ or '').strip()}\n\n"
    known = flags(config_class)
    if HELP & {*sys.argv} and "all" not in sys.argv:
        if is_main_rank():
            print(about + _usual_help(config_class))
            print(f"\n--help all has all {len(known)} flags.\n{CONFIG}")
        sys.exit()
    with clean_exit():
        config = parse(config_class, description=about + CONFIG)
    print_main("loading PyTorch")
    return config


def _usual_help(config_class: type) -> str:
    """The entries of tyro's help for the flags in `USUAL`."""
    os.environ["COLUMNS"] = str(min(100, shutil.get_terminal_size().columns))  # one column
    text = io.StringIO()  # of no encoding, so that tyro draws no boxes
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        parse(config_class, ["--help"])
    shown, is_usual = [], False
    for line in text.getvalue().splitlines():
        if not line.startswith(" " * 8):  # a flag, or a group's title
            flag = re.match(r" +--(\w+)", line)
            is_usual = flag is not None and flag[1] in USUAL
        if is_usual and line.strip():
            shown.append(line.rstrip())
    return "\n".join(shown)


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
    tokens = sys.argv[1:] if argv is None else argv
    if HELP.intersection(tokens):
        import tyro  # here, since only --help needs it

        tyro.cli(
            config_class,
            args=["--help"],
            description=description,
            use_underscores=True,
            console_outputs=is_main_rank(),
            config=(tyro.conf.OmitArgPrefixes,),  # flat names; one titled help box per group
        )
    known = flags(config_class)
    typed = _read_command_line(tokens, known)
    in_file: dict[str, tuple[list[str], str]] = {}
    if paths := typed.pop("config", None):
        in_file = _read_yaml(Path(paths[-1]).expanduser(), known, only_known)
    # another budget of the command line replaces that of the file, too
    replaced = BUDGETS if BUDGETS & typed.keys() else set()
    kept = {key: texts for key, (texts, _) in in_file.items() if key not in replaced}
    try:
        values = {key: known[key].value(texts) for key, texts in (kept | typed).items()}
        return config_class(**_nested(values, config_class))
    except ConfigError as error:
        flag = re.match(r"--(\w+)", str(error))
        if flag and flag[1] in in_file.keys() - typed.keys():
            raise ConfigError(f"{in_file[flag[1]][1]}: {error}") from None
        raise


def _read_command_line(tokens: Sequence[str], known: dict[str, Flag]) -> dict[str, list[str]]:
    """The given values of each field, as text. A switch without a value is on."""
    values: dict[str, list[str]] = {}
    unknown: list[str] = []
    switches = {name for name, flag in known.items() if flag.is_switch}
    key = ""
    for token in tokens:
        if not token.startswith("--"):
            if not values:
                raise ConfigError(
                    f"unexpected argument {token!r}: flags begin with --; --help all lists them"
                )
            values[key].append(token)
            continue
        flag, equals, text = token.partition("=")
        key = flag[2:].replace("-", "_")
        texts = [text] if equals else []
        if key.removeprefix("no_") in switches and key not in known:
            key = key[3:]
            texts = ["false", *texts]
        if key not in known and key != "config":
            unknown.append(f"{flag}{_suggest(key, known, '--')}")
        elif key in values and (key == "config" or ... in known[key].parts):
            raise ConfigError(f"{flag} is given twice: put all of its values after one {flag}")
        values[key] = texts
    if unknown:
        more = "; docs/coming_from.md has those of Trainer, TRL, timm and others"
        more *= any(": " not in flag for flag in unknown)
        raise ConfigError(
            f"unknown flag{'s' * (len(unknown) > 1)} {'; '.join(unknown)}; "
            f"--help all lists all{more}"
        )
    for key, texts in values.items():
        if not texts and key not in switches:  # an unset variable must not start the demo
            raise ConfigError(f"--{key} needs a value")
    return {key: texts or ["true"] for key, texts in values.items()}


def _read_yaml(
    path: Path, known: dict[str, Flag], only_known: bool
) -> dict[str, tuple[list[str], str]]:
    """(values as text, file and line) of each key of a YAML file. No YAML tag is followed: values
    are what is written.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(f"{path}{line}: not valid YAML ({problem})") from None
    if root is not None and not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}: expected 'key: value' lines")
    values: dict[str, tuple[list[str], str]] = {}
    unknown: list[str] = []
    for name, node in root.value if root else ():
        key = str(name.value).replace("-", "_")
        place = f"{path}:{name.start_mark.line + 1}"
        if key not in known:
            unknown.append(f"{place}: unknown key {key!r}{_suggest(key, known)}")
            continue
        if key in values:
            raise ConfigError(f"{place}: the key {key!r} is there twice")
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if not all(isinstance(item, yaml.ScalarNode) for item in items):
            raise ConfigError(
                f"{place}: {key}: expected a value or a list of values; keys "
                "are flat, as the flags are"
            )
        texts = [item.value for item in items]
        if node.tag.endswith(":null"):
            texts = ["None" if type(None) in known[key].parts else ""]
        values[key] = texts, place
    if unknown and not only_known:
        raise ConfigError("; ".join(unknown))
    return values


def _suggest(key: str, known: dict[str, Flag], prefix: str = "") -> str:
    """What to give instead of an unknown key."""
    table = Path(__file__).with_name("other_programs.yaml").read_text(encoding="utf-8")
    name = yaml.safe_load(table).get(key, key)
    if " " in name:
        return f": {name}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.71)
    return f": did you mean {prefix}{near[0]}?" if near else ""
