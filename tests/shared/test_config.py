"""One frozen config from YAML and the command line, or one clear line."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.config import parse as configs
from shared.config.options import BatchConfig, CheckpointConfig, LogConfig, OptimConfig, SpeedConfig
from shared.data.options import DataConfig
from shared.process import ranks, signals
from shared.process.errors import CleanExit, ConfigError
from shared.process.signals import clean_exit
from shared.text.options import ChatConfig, CorpusConfig

TEMPLATES = Path(__file__).parents[2] / "templates"


@dataclass(frozen=True)
class Group:
    """A group."""

    count: int = 1
    """Things."""
    limit: int | None = None
    """Things at most."""
    where: Path | None = None
    """A place."""


@dataclass(frozen=True)
class Config:
    """For tests."""

    rate: float = 1.0
    """A rate."""
    label: str = "a"
    """Text."""
    title: str | None = None
    """Text or nothing."""
    words: tuple[str, ...] = ("x", "y")
    """Some words."""
    shuffle: bool = False
    """On or off."""
    careful: bool = True
    """On or off."""
    shape: Literal["round", "flat"] = "round"
    """One of two."""
    group: Group = field(default_factory=Group)


@dataclass(frozen=True)
class BothBatches:
    """For tests."""

    batch: BatchConfig = field(default_factory=BatchConfig)


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "SHOW_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def templates():
    found = {}
    for name in ("pretrain", "lora_finetune", "image_classification"):
        spec = importlib.util.spec_from_file_location(f"_config_test_{name}", TEMPLATES / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # a dataclass's annotations are resolved in its module
        spec.loader.exec_module(module)
        found[name] = module
    return SimpleNamespace(**found)


def from_yaml(tmp_path, text, *argv, config_class=Config):
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return configs.parse(config_class, ["--config", str(path), *argv])


def one_line(error) -> str:
    message = str(error.value)
    assert message
    assert "\n" not in message
    return message


# YAML and the command line -------------------------------------------------------------------------------------------


def test_no_argument_gives_the_defaults():
    assert configs.parse(Config, []) == Config()


def test_the_config_and_its_groups_are_frozen():
    config = configs.parse(Config, [])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.rate = 2.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.group.count = 2


def test_yaml_and_the_command_line_give_the_same_config(tmp_path):
    text = (
        "rate: 0.5\nlabel: b\ntitle: t\nwords: [p, q, r]\nshuffle: true\ncareful: false\nshape: flat\ncount: 3\nlimit: 4\n"
    )
    argv = ["--rate", "0.5", "--label", "b", "--title=t", "--words", "p", "q", "r", "--shuffle", "--no_careful"]
    argv += ["--shape", "flat", "--count=3", "--limit", "4"]
    expected = Config(0.5, "b", "t", ("p", "q", "r"), True, False, "flat", Group(3, 4))
    assert from_yaml(tmp_path, text) == expected
    assert configs.parse(Config, argv) == expected


def test_the_command_line_wins_over_yaml_wherever_it_stands(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("rate: 0.5\nwords: [p, q]\nshuffle: true\ncareful: false\ncount: 3\nlimit: 9\n")
    expected = Config(rate=0.25, words=("z",), shuffle=False, careful=True, group=Group(count=3, limit=None))
    argv = ["--rate", "0.25", "--words", "z", "--no_shuffle", "--careful", "--limit", "None"]
    assert configs.parse(Config, ["--config", str(path), *argv]) == expected
    assert configs.parse(Config, [*argv, f"--config={path}"]) == expected


@pytest.mark.parametrize("text", ["1e-4", "1E-4", ".0001", "0.0001", "'1e-4'"])
def test_a_float_in_yaml_is_a_float_in_every_spelling(tmp_path, text):
    rate = from_yaml(tmp_path, f"rate: {text}\n").rate
    assert type(rate) is float
    assert rate == 1e-4


def test_dashes_and_underscores_both_work(tmp_path):
    for argv in (["--global-batch-size", "8"], ["--global_batch_size", "8"], ["--global-batch-size=8"]):
        assert configs.parse(BatchConfig, argv) == BatchConfig(global_batch_size=8)
    assert from_yaml(tmp_path, "global-batch-size: 8", config_class=BatchConfig) == BatchConfig(global_batch_size=8)


def test_a_dash_on_the_command_line_wins_over_an_underscore_in_yaml(tmp_path):
    config = from_yaml(tmp_path, "global_batch_size: 16\n", "--global-batch-size", "8", config_class=BatchConfig)
    assert config.global_batch_size == 8


@pytest.mark.parametrize("spelling", ["--shuffle", "--shuffle true", "--shuffle True", "--shuffle=true"])
def test_every_spelling_that_turns_a_flag_on(spelling):
    assert configs.parse(Config, spelling.split()).shuffle is True


@pytest.mark.parametrize(
    "spelling", ["--no_careful", "--no-careful", "--careful false", "--careful False", "--careful=false"]
)
def test_every_spelling_that_turns_a_flag_off(spelling):
    assert configs.parse(Config, [*spelling.split(), "--rate", "2"]) == Config(rate=2.0, careful=False)


def test_lists_are_taken_whole_and_may_be_empty(tmp_path):
    assert from_yaml(tmp_path, "words: [p]\n").words == ("p",)
    assert from_yaml(tmp_path, "words:\n- p\n- 2\n").words == ("p", "2")
    assert from_yaml(tmp_path, "words: []\nrate: 2.0\n") == Config(words=(), rate=2.0)
    assert from_yaml(tmp_path, "words: p\n").words == ("p",)
    for words in (["--words", "p", "q"], ["--words=p", "q"]):
        assert configs.parse(Config, [*words, "--rate", "2"]) == Config(words=("p", "q"), rate=2.0)
    assert from_yaml(tmp_path, "words: [p]\n", "--words").words == ()


def test_null_in_yaml_is_none(tmp_path):
    for null in ("null", "~", "", "None"):
        config = from_yaml(tmp_path, f"limit: {null}\ntitle: {null}\nwhere: {null}\n")
        assert config == Config()
        assert config.group.limit is None


def test_an_empty_yaml_file_changes_nothing(tmp_path):
    assert from_yaml(tmp_path, "") == Config()
    assert from_yaml(tmp_path, "# nothing\n") == Config()


def test_text_keeps_what_yaml_or_a_shell_could_misread(tmp_path):
    for label in ("a=b", "--rate", "-1", "1e-4", "true", " padded ", "two\nlines", "", "é #"):
        assert from_yaml(tmp_path, yaml.safe_dump({"label": label}, allow_unicode=True)).label == label


# What is refused -----------------------------------------------------------------------------------------------------


def test_an_unknown_flag_names_the_near_one():
    with pytest.raises(ConfigError, match=r"unknown flag --lable: did you mean --label\?") as error:
        configs.parse(Config, ["--lable", "x"])
    one_line(error)


def test_a_flag_that_resembles_nothing_gets_no_suggestion():
    with pytest.raises(ConfigError, match="unknown flag --zzzzqqq; --help") as error:
        configs.parse(Config, ["--zzzzqqq"])
    assert "did you mean" not in one_line(error)


def test_an_unknown_yaml_key_names_the_file_and_the_near_one(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.yaml:1: unknown key 'ruffle': did you mean shuffle\?"):
        from_yaml(tmp_path, "ruffle: true\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--rate", "nan"], "--rate is nan, with which nothing can be computed"),
        (["--rate=inf"], "--rate is inf"),
        (["--rate=-inf"], "--rate is -inf"),
        (["--words", "a", "--words", "b"], "--words is given twice"),
        (["--words=a", "--words=b"], "--words is given twice"),
        (["--config", "a", "--config", "b"], "--config is given twice"),
        (["--config", "a", "--config=b"], "--config is given twice"),
        (["--shuffle", "yes"], "--shuffle yes: it is true or false"),
        (["--shuffle", "1", "--rate", "1"], "--shuffle 1: it is true or false"),
        (["--no_shuffle", "false"], "--no_shuffle false: --no_shuffle takes no value"),
        (["--no_shuffle=false"], "--no_shuffle=false: --no_shuffle takes no value"),
        (["--label", "--rate", "1"], r"--label needs a value, which --rate is not; --label=... takes any"),
        (["--label", "-rate", "1"], r"--label needs a value, which -rate is not; --label=... takes any"),
        (["--words", "a", "-b"], "--words: a value that begins with a dash, as '-b', would be a flag"),
        (["--words", ""], "--words is given, but empty"),
        (["--words", "a,b"], "--words: 'a,b': several values have spaces between them"),
        (["--config", "--rate", "1"], "--config needs the path of a YAML file"),
    ],
)
def test_what_could_be_taken_for_something_else_is_refused(argv, message):
    with pytest.raises(ConfigError, match=message) as error:
        configs.parse(Config, argv)
    one_line(error)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("label: off", "label: YAML reads yes, no, on and off as true or false"),
        ("words: [yes]", "words: YAML reads"),
        ("count:", "count is empty"),
        ("words: [--rate, '3']", "words: a value that begins with a dash, as '--rate', would be a flag"),
        ("count: true", "count is a number, not true"),
        ("rate: 2020-01-01", "rate is a number, not '2020-01-01'"),
        ("rate: .nan", "--rate is nan"),
    ],
)
def test_what_yaml_means_otherwise_is_refused(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message) as error:
        from_yaml(tmp_path, line)
    one_line(error)


def test_a_path_may_begin_at_home_and_may_not_be_empty(templates, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    parse = partial(configs.parse, templates.pretrain.Config)
    for argv in (["--output_dir=~/run"], ["--output_dir", "~/run"]):
        assert parse(argv).checkpoint.output_dir == Path("/home/me/run")
    assert parse(["--sample_prompt=~/run"]).sample_prompt == "~/run"
    assert parse(["--model_name_or_path", "~/a~b"]).model_name_or_path == "/home/me/a~b"
    for flag in ("output_dir", "resume_from_checkpoint", "train_file", "model_name_or_path", "dataset_name"):
        for argv in ([f"--{flag}="], [f"--{flag}", ""]):
            with pytest.raises(ConfigError, match=f"--{flag} is given, but empty"):
                parse(argv)
        with pytest.raises(ConfigError, match=rf"run\.yaml:2: {flag} is given, but empty"):
            from_yaml(tmp_path, f"seed: 1\n{flag}: ''\n", config_class=templates.pretrain.Config)


def test_only_switches_can_be_negated():
    with pytest.raises(ConfigError, match="unknown flag --no_label"):
        configs.parse(Config, ["--no_label"])


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (["--count", "many"], "--count is a whole number, not 'many'"),
        (["--count", "1.5"], "--count is a whole number, not '1.5'"),
        (["--count", "1e400"], "--count is a whole number, not '1e400'"),
        (["--rate", "fast"], "--rate is a number, not 'fast'"),
        (["--limit", "x"], "--limit is a whole number, not 'x'"),
        (["--shape", "square"], "--shape is one of round, flat, not 'square'"),
        (["--shuffle=perhaps"], "--shuffle"),
        (["--count"], "--count needs a value"),
        (["stray"], "'stray' belongs to no flag"),
        (["--rate", "1", "2"], "'2' belongs to no flag"),
        (["--config"], "--config"),
    ],
)
def test_a_value_of_the_wrong_type_is_one_line_that_names_the_flag(argv, names):
    with pytest.raises(ConfigError) as error:
        configs.parse(Config, argv)
    assert names in one_line(error)


def test_help_is_help_wherever_it_stands(capsys):
    for argv in (["--label", "-h"], ["--count", "x", "--help"], ["-h", "--config", "/nowhere"]):
        with pytest.raises(SystemExit) as end:
            configs.parse(Config, argv)
        assert not end.value.code and "--label" in capsys.readouterr().out


def test_a_variable_that_is_not_set_does_not_train_the_demo(templates, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "run.yaml").write_text(f"train_file: {tmp_path}/a.txt\n")
    parse = partial(configs.parse, templates.pretrain.Config)
    with pytest.raises(ConfigError, match="--train_file needs a value, which --max_steps is not"):
        parse(["--train_file", "--max_steps", "3"])
    assert parse(["--config", str(tmp_path / "run.yaml"), "--train_file", "--dataset_name", "x"]).text.train_file == ()


def test_whole_numbers_may_have_an_exponent(tmp_path):
    assert configs.parse(Config, ["--limit", "1e18"]).group.limit == 10**18
    for text in ("3e3", "3E+3", "3000.0", "3_000"):
        assert configs.parse(Config, ["--count", text, f"--limit={text}"]).group == Group(3000, 3000)
        assert from_yaml(tmp_path, f"count: {text}\nlimit: {text}\n").group == Group(3000, 3000)


@pytest.mark.parametrize(
    ("flag", "then"),
    [
        ("lr", "did you mean --learning_rate?"),
        ("batch_size", "did you mean --global_batch_size?"),
        ("gradient_accumulation_steps", "it follows from --global_batch_size and --per_device_train_batch_size"),
        ("bf16", "precision is the launcher's: accelerate launch --mixed_precision"),
    ],
)
def test_what_other_programs_call_it_is_known(templates, flag, then):
    with pytest.raises(ConfigError) as error:
        configs.parse(templates.pretrain.Config, [f"--{flag}", "1"])
    assert one_line(error).startswith(f"unknown flag --{flag}: {then}")


@pytest.mark.parametrize(
    "line", ["count: many", "count: 1.5", "rate: fast", "limit: x", "shape: square", "label: true", "rate: [1, 2]"]
)
def test_a_yaml_value_of_the_wrong_type_is_one_line_that_names_the_key(tmp_path, line):
    with pytest.raises(ConfigError) as error:
        from_yaml(tmp_path, line)
    assert one_line(error).startswith(f"{tmp_path}/run.yaml:1: {line.split(':')[0]}")


@pytest.mark.parametrize("value", ["'true'", "1", "null", "[true]"])
def test_a_yaml_switch_is_true_or_false_only(tmp_path, value):
    with pytest.raises(ConfigError, match="shuffle is true or false"):
        from_yaml(tmp_path, f"shuffle: {value}\n")


@pytest.mark.parametrize(
    ("text", "line"),
    [("rate: 1\nlabel: 'open\n", 3), ("rate: 1\n\tlabel: x\n", 2), ("label: [a\n", 2), ("rate: 1\nlabel: a: b\n", 2)],
)
def test_a_yaml_syntax_error_gives_file_and_line(tmp_path, text, line):
    with pytest.raises(ConfigError, match=rf"run\.yaml:{line}: not valid YAML") as error:
        from_yaml(tmp_path, text)
    one_line(error)


def test_a_missing_yaml_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--config .*gone\.yaml: no such file"):
        configs.parse(Config, ["--config", str(tmp_path / "gone.yaml")])


def test_a_folder_or_bytes_in_place_of_yaml_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="--config"):
        configs.parse(Config, ["--config", str(tmp_path)])
    (tmp_path / "latin.yaml").write_bytes(b"label: \xe9\n")
    with pytest.raises(ConfigError, match="--config"):
        configs.parse(Config, ["--config", str(tmp_path / "latin.yaml")])


@pytest.mark.parametrize("text", ["- rate\n", "rate\n", "3\n"])
def test_yaml_that_is_not_a_mapping_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="expected 'key: value' lines"):
        from_yaml(tmp_path, text)


@pytest.mark.parametrize(
    "text", ["rate: 1\ncount: 2\nrate: 3\n", "keep_rate: 1\nrate: 2\nkeep-rate: 3\n", "rate: 1\n\nrate: 1\n"]
)
def test_a_key_that_is_there_twice_is_refused_with_its_line(tmp_path, text):
    with pytest.raises(ConfigError, match=r"run\.yaml:3: the key '(keep_)?rate' is there twice"):
        from_yaml(tmp_path, text)


LAUGHS = "\n".join(f"  - &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 12))


@pytest.mark.parametrize(
    "text", ["words: [[a]]", "words: [null]", "words: [{a: 1}]", "label: !!binary aGk=", f"words:\n  - &l0 [a]\n{LAUGHS}"]
)
def test_a_value_that_no_flag_could_have_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match=r"run\.yaml:1: (words|label): expected text, a number") as error:
        from_yaml(tmp_path, text + "\n")
    one_line(error)


def test_a_nested_mapping_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="label: expected a value, found a mapping"):
        from_yaml(tmp_path, "label:\n  a: 1\n")
    with pytest.raises(ConfigError, match="unknown key 'group'"):
        from_yaml(tmp_path, "group:\n  count: 1\n")


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.mkdir [{marker}]",
        "!!python/object/new:os.mkdir [{marker}]",
        "!!python/name:os.mkdir ''",
        "!unknown x",
    ],
)
def test_a_yaml_tag_runs_nothing_and_is_refused(tmp_path, value):
    marker = tmp_path / "made"
    with pytest.raises(ConfigError, match=r"run\.yaml:1: not valid YAML"):
        from_yaml(tmp_path, f"label: {value.format(marker=marker)}\n")
    assert not marker.exists()


@pytest.mark.parametrize(
    "text", ["label: 2024-99-99", "label: !!int abc", "label: " + "[" * 2000, "? [a]\n: b", "label: \0"]
)
def test_yaml_that_the_loader_itself_trips_over_is_one_clear_line(tmp_path, text):
    with pytest.raises(ConfigError, match=r"run\.yaml"):
        from_yaml(tmp_path, text)


@settings(deadline=None, max_examples=150)
@given(text=st.text(alphabet=st.sampled_from("ratelbwods: \n-[]{}'\"!&*#|>?%@,123.eE~\t"), max_size=60))
def test_any_text_as_yaml_gives_a_config_or_a_config_error(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_text(text)
    with contextlib.suppress(ConfigError):
        assert isinstance(configs.parse(Config, ["--config", str(path)]), Config)


ARGUMENTS = [
    "--rate",
    "--no_rate",
    "--shuffle",
    "--words",
    "--count=1",
    "1",
    "-1",
    "x",
    "true",
    "--x",
    "-h=",
    "=",
    "--",
    "-",
]


@settings(deadline=None, max_examples=100)
@given(argv=st.lists(st.sampled_from(ARGUMENTS)))
def test_any_command_line_gives_a_config_or_a_config_error(argv):
    try:
        assert isinstance(configs.parse(Config, argv), Config)
    except ConfigError as error:
        assert "\n" not in str(error)


# Saved and read back -------------------------------------------------------------------------------------------------

LINE_BREAKS = "\x85\u2028\u2029"  # of Unicode, to which YAML has its own rules: a test of their own
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters=LINE_BREAKS), max_size=12)
OPTIONAL_TEXT = st.none() | TEXT.filter(lambda text: text != "None")  # the flag's own spelling of null
NAME = TEXT.filter(lambda text: text != "None" and text[:1] not in ("", "~"))
PLACE = st.none() | NAME  # of a file, on the Hub perhaps
WORDS = st.lists(TEXT.filter(lambda text: text and text[0] != "-" and "," not in text), max_size=3).map(
    tuple
)  # no flag can give a dash
SHARE = st.floats(0, 1)
POSITIVE = st.floats(1e-12, 1e6)
COUNT = st.integers(1, 10**9)


@st.composite
def shared_values(draw):
    per_device, accumulation = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    steps = draw(st.none() | COUNT)
    return {
        "per_device_train_batch_size": per_device,
        "global_batch_size": per_device * accumulation,
        "max_steps": steps,
        "num_train_epochs": None if steps else draw(st.none() | POSITIVE),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "optim": draw(st.sampled_from(["adamw", "muon", "adamw_8bit"])),
        "learning_rate": draw(POSITIVE),
        "weight_decay": draw(st.floats(0, 10)),
        "adam_epsilon": draw(POSITIVE),
        "warmup_ratio": draw(SHARE),
        "min_lr_ratio": draw(SHARE),
        "gradient_checkpointing": draw(st.sampled_from(["none", "full", "2"])),
        "torch_compile": draw(st.booleans()),
        "attn_implementation": draw(st.sampled_from(["eager", "sdpa", "flex_attention"])),
        "output_dir": draw(PLACE.map(lambda text: text and Path(text))),
        "save_steps": draw(COUNT),
        "report_to": draw(TEXT),
        "run_name": draw(OPTIONAL_TEXT),
        "dataset_name": draw(PLACE),
        "validation_split_percentage": draw(st.floats(0.01, 99)),
    }


@st.composite
def pretrain_values(draw):
    return draw(shared_values()) | {
        "seq_length": draw(COUNT),
        "config_name": draw(PLACE),
        "config_overrides": draw(OPTIONAL_TEXT),
        "final_dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        "sample_prompt": draw(TEXT),
        "vocab_size": draw(st.integers(300, 10**6)),
        "streaming": draw(st.booleans()),
        "preprocessing_num_workers": draw(st.none() | COUNT),
    }


@st.composite
def lora_values(draw):
    of_new_adapters = {
        "lora_alpha": draw(COUNT),
        "lora_target_modules": draw(WORDS),
        "modules_to_save": draw(WORDS),
        "use_rslora": draw(st.booleans()),
    }
    adapter = {"adapter_name_or_path": draw(NAME)}
    return (
        draw(shared_values())
        | draw(st.sampled_from([of_new_adapters, adapter]))
        | {
            "model_name_or_path": draw(NAME),
            "packing": draw(st.booleans()),
            "loss_on": draw(st.sampled_from(["assistant", "completion", "all"])),
            "max_train_samples": draw(st.none() | COUNT),
        }
    )


def with_values(config, values):
    """`config` with flat values changed, those of a group at once, since they are checked together."""
    changes = {}
    for name, _, group in configs.fields(type(config)):
        if name in values:
            changes.setdefault(group, {})[name] = values[name]
    own = changes.pop(None, {})
    groups = {group: dataclasses.replace(getattr(config, group), **inner) for group, inner in changes.items()}
    return dataclasses.replace(config, **own, **groups)


def assert_round_trip(config, path):
    configs.save(config, path)
    assert configs.parse(type(config), ["--config", str(path)]) == config


def test_the_default_configs_of_the_templates_round_trip(templates, tmp_path):
    assert_round_trip(templates.pretrain.Config(), tmp_path / "p.yaml")
    assert_round_trip(templates.lora_finetune.Config(), tmp_path / "l.yaml")


@settings(deadline=None, max_examples=40)
@given(values=pretrain_values())
def test_a_saved_pretraining_config_is_read_back_equal(templates, tmp_path_factory, values):
    config = with_values(templates.pretrain.Config(), values)
    assert_round_trip(config, tmp_path_factory.getbasetemp() / "pretrain.yaml")


@settings(deadline=None, max_examples=40)
@given(values=lora_values())
def test_a_saved_fine_tuning_config_is_read_back_equal(templates, tmp_path_factory, values):
    config = with_values(templates.lora_finetune.Config(), values)
    assert_round_trip(config, tmp_path_factory.getbasetemp() / "lora.yaml")


@pytest.mark.parametrize("character", LINE_BREAKS + "\r\n\t\0\ufeff\x1b'\"#:é😀")
def test_text_with_any_character_is_read_back_equal(tmp_path, character):
    assert_round_trip(Config(label=f"a{character}b", title=character, words=(f"a {character}",)), tmp_path / "run.yaml")


def test_files_round_trip_with_their_groups(templates, tmp_path):
    (tmp_path / "a b.txt").write_text("x")
    path = str(tmp_path / "a b.txt")
    config = with_values(templates.pretrain.Config(), {"train_file": (path, path), "validation_file": (path,)})
    assert_round_trip(config, tmp_path / "run.yaml")


def test_save_writes_every_field_flat_in_plain_yaml(templates, tmp_path):
    config = configs.replace(templates.pretrain.Config(), output_dir=Path("a/b"))
    configs.save(config, tmp_path / "run.yaml")
    content = yaml.safe_load((tmp_path / "run.yaml").read_text())
    assert list(content) == [name for name, _, _ in configs.fields(type(config))]
    assert content["output_dir"] == "a/b"
    assert content["train_file"] == []
    assert content["learning_rate"] == 3e-3


def test_no_two_groups_of_a_template_share_a_flat_name(templates):
    for template in (templates.pretrain, templates.lora_finetune):
        names = [name for name, _, _ in configs.fields(template.Config)]
        assert len(names) == len(set(names))


def test_replace_changes_groups_and_leaves_the_original():
    config = Config()
    changed = configs.replace(config, count=5, rate=2.0)
    assert changed == Config(rate=2.0, group=Group(count=5))
    assert config == Config()


def test_replace_changes_fields_that_are_checked_together():
    changed = configs.replace(BothBatches(), per_device_train_batch_size=3, global_batch_size=6)
    assert changed.batch == BatchConfig(global_batch_size=6, per_device_train_batch_size=3)


# Groups --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        (BatchConfig, {"global_batch_size": 0}, "--global_batch_size must be at least 1, not 0"),
        (BatchConfig, {"per_device_train_batch_size": 0}, "--per_device_train_batch_size must be at least 1"),
        (BatchConfig, {"per_device_eval_batch_size": -1}, "--per_device_eval_batch_size must be at least 1"),
        (BatchConfig, {"max_steps": 1, "num_train_epochs": 1.0}, "--max_steps and --num_train_epochs"),
        (BatchConfig, {"max_steps": 0}, "--max_steps must be positive"),
        (BatchConfig, {"seed": -1}, "--seed must be between 0 and 2**32 - 1, not -1"),
        (BatchConfig, {"dataloader_num_workers": -1}, "--dataloader_num_workers must be between 0 and 1023, not -1"),
        (BatchConfig, {"num_train_epochs": -0.5}, "--num_train_epochs must be positive"),
        (BatchConfig, {"num_train_epochs": math.nan}, "--num_train_epochs"),
        (BatchConfig, {"num_train_epochs": math.inf}, "--num_train_epochs"),
        (OptimConfig, {"learning_rate": 0.0}, "--learning_rate must be positive"),
        (OptimConfig, {"learning_rate": math.nan}, "--learning_rate must be positive"),
        (OptimConfig, {"warmup_ratio": 1.5}, "--warmup_ratio is a share between 0 and 1"),
        (OptimConfig, {"decay_ratio": -0.1}, "--decay_ratio is a share between 0 and 1"),
        (OptimConfig, {"min_lr_ratio": math.nan}, "--min_lr_ratio is a share between 0 and 1"),
        (OptimConfig, {"weight_decay": -1.0}, "--weight_decay must not be negative"),
        (OptimConfig, {"max_grad_norm": -1.0}, "--max_grad_norm must not be negative"),
        (SpeedConfig, {"gradient_checkpointing": "0"}, "--gradient_checkpointing is none, full or a number"),
        (SpeedConfig, {"gradient_checkpointing": "some"}, "--gradient_checkpointing is none, full or a number"),
        (SpeedConfig, {"gradient_checkpointing": "-1"}, "--gradient_checkpointing is none, full or a number"),
        (CheckpointConfig, {"save_steps": 0}, "--save_steps must be at least 1"),
        (CheckpointConfig, {"save_total_limit": 0}, "--save_total_limit must be at least 1"),
        (LogConfig, {"logging_steps": 0}, "--logging_steps must be at least 1"),
        (DataConfig, {"train_file": ("a",), "dataset_name": "b"}, "--train_file and --dataset_name"),
        (DataConfig, {"validation_file": ("a",)}, "--validation_file needs --train_file"),
        (DataConfig, {"train_split_name": "x"}, "--train_split_name needs --dataset_name"),
        (DataConfig, {"dataset_config_name": "x"}, "--dataset_config_name needs --dataset_name"),
        (
            DataConfig,
            {"validation_split_percentage": 0.0},
            "--validation_split_percentage must be above 0 and below 100, not 0",
        ),
        (
            DataConfig,
            {"validation_split_percentage": 100.0},
            "--validation_split_percentage must be above 0 and below 100, not 100",
        ),
        (DataConfig, {"train_file": ("no/such/file.jsonl",)}, "--train_file no/such/file.jsonl: no such file"),
        (CorpusConfig, {"streaming": True, "preprocess_only": True}, "--streaming works with none of"),
        (CorpusConfig, {"vocab_size": 299}, "--vocab_size must be at least 300"),
        (CorpusConfig, {"train_file": ("no/such.txt",)}, "--train_file no/such.txt: no such file"),
        (ChatConfig, {"seq_length": 7}, "--seq_length must be at least 8, not 7"),
        (ChatConfig, {"train_file": ("no/such.txt",)}, "--train_file no/such.txt: no such file"),
    ],
)
def test_a_group_refuses_what_cannot_work(group, values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        group(**values)


def test_each_template_refuses_what_cannot_work(templates):
    cases = [
        (templates.pretrain, {"model_preset": "9M"}, "--model_preset 9M"),
        (templates.pretrain, {"config_name": "a", "model_name_or_path": "b"}, "--config_name and --model_name_or_path"),
        (templates.pretrain, {"max_tokens": 10, "batch": BatchConfig(max_steps=1)}, "--max_tokens and --max_steps"),
        (templates.lora_finetune, {"load_in_4bit": True, "load_in_8bit": True}, "--load_in_4bit and --load_in_8bit"),
        (templates.lora_finetune, {"init_lora_weights": "pissa", "use_dora": True}, "--init_lora_weights pissa"),
        (templates.lora_finetune, {"lora_r": 0}, "--lora_r must be at least 1"),
        (templates.lora_finetune, {"eval_steps": 0}, "--eval_steps must be at least 1, not 0"),
        (templates.pretrain, {"eval_samples": 0}, "--eval_samples must be at least 1, not 0"),
        (templates.pretrain, {"seq_length": 0}, "--seq_length must be at least 1, not 0"),
        (templates.pretrain, {"max_tokens": -5}, "--max_tokens must be at least 1, not -5"),
        (templates.lora_finetune, {"max_new_tokens": 0}, "--max_new_tokens must be at least 1, not 0"),
        (templates.lora_finetune, {"num_generations": -1}, "--num_generations must not be negative, not -1"),
        (templates.image_classification, {"eval_steps": 0}, "--eval_steps must be at least 1, not 0"),
        (templates.image_classification, {"early_stopping_patience": -1}, "--early_stopping_patience must not be negative"),
    ]
    for template, values, message in cases:
        with pytest.raises(ConfigError, match=re.escape(message)):
            template.Config(**values)


def test_a_refusal_of_a_group_passes_through_parse_as_it_is(tmp_path):
    with pytest.raises(ConfigError) as error:
        from_yaml(tmp_path, "learning_rate: -1e-4\n", config_class=OptimConfig)
    assert str(error.value) == "--learning_rate must be positive, not -0.0001"


def test_the_batch_must_divide_over_the_processes_that_were_launched(templates, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="32 is not a multiple of the 3 processes that read data: 30 or 33 would be"):
        templates.pretrain.Config(batch=BatchConfig(32, 4))
    with pytest.raises(ConfigError, match="2 is not a multiple of the 3 processes that read data: 3 would be"):
        templates.image_classification.Config(batch=BatchConfig(2, 4))
    assert BatchConfig(24, 4).micro_batch() == (4, 2)


def test_processes_that_share_a_model_read_the_same(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ranks.data_parallel_size() == 8
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for name, size in {"DP_REPLICATE": 2, "DP_SHARD": 2, "TP": 2, "CP": 1, "SP": 1}.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", str(size))
    assert ranks.data_parallel_size() == 4
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    with pytest.raises(ConfigError, match="dp_replicate_size 2 x dp_shard_size 2 x tp_size 4"):
        ranks.data_parallel_size()


@settings(deadline=None, max_examples=100)
@given(size=st.integers(1, 300), per_device=st.integers(1, 64), world=st.integers(1, 16))
def test_the_micro_batch_is_the_largest_that_makes_up_the_global_batch(size, per_device, world):
    batch = BatchConfig(size, per_device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(world))
        if size % world:
            with pytest.raises(ConfigError, match=f"multiple of the {world} processes"):
                batch.micro_batch()
            return
        rows, accumulation = batch.micro_batch()
    assert rows <= per_device and rows * accumulation * world == size
    share, both_even = size // world, size // world % 2 == 0 and per_device % 2 == 0
    assert rows % 2 == 0 or not both_even
    larger = [n for n in range(rows + 1, min(per_device, share) + 1) if share % n == 0]
    assert not [n for n in larger if n % 2 == 0 or not both_even]


def test_total_steps_is_the_budget_that_was_given():
    assert BatchConfig(max_steps=7).total_steps(100, default=3) == 7
    assert BatchConfig(num_train_epochs=2.5).total_steps(100, default=3) == 250
    assert BatchConfig(num_train_epochs=0.001).total_steps(100) == 1
    assert BatchConfig(num_train_epochs=1.5).total_steps(3) == 5  # rounded up: no part of the budget is lost
    assert BatchConfig().total_steps(100, default=3) == 3
    assert BatchConfig().total_steps(100) == 100


# Exit codes and what is printed --------------------------------------------------------------------------------------


class Stop(CleanExit):
    exit_code = 143


@pytest.mark.parametrize(("error", "code", "line"), [(ConfigError("a"), 2, "error: a\n"), (Stop("saved"), 143, "saved\n")])
def test_a_clean_exit_is_one_line_and_its_code(capsys, error, code, line):
    with pytest.raises(SystemExit) as end, clean_exit():
        raise error
    assert end.value.code == code
    assert capsys.readouterr() == ("", line)


def test_ctrl_c_is_one_line(capsys):
    with pytest.raises(SystemExit) as end, clean_exit():
        raise KeyboardInterrupt
    assert end.value.code == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_what_an_error_quotes_cannot_break_its_line_or_fill_the_console():
    assert str(ConfigError("a\n\x1b[2J\u2028\ud800 é🙂")) == r"a\n\x1b[2J\u2028\ud800 é🙂"
    long = str(ConfigError("file.jsonl:3: " + "x" * 10**6 + "; name it with --text_column"))
    assert len(long) < 2100 and long.startswith("file.jsonl:3: ") and long.endswith("; name it with --text_column")


def test_another_rank_waits_for_the_main_one_to_tell_and_then_says_who_it_is(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    waits = []
    monkeypatch.setattr(signals.time, "sleep", waits.append)
    monkeypatch.setattr(signals.signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as end, clean_exit():
        raise ConfigError("a")
    assert end.value.code == 2
    assert waits == [5] and capsys.readouterr() == ("", "error on rank 1: a\n")
    with pytest.raises(SystemExit), clean_exit():
        raise Stop("all have agreed on it")
    assert waits == [5, 1] and capsys.readouterr() == ("", "")


def test_a_traceback_is_there_for_whoever_asks(capsys, monkeypatch):
    monkeypatch.setenv("SHOW_TRACEBACK", "1")
    with pytest.raises(SystemExit), clean_exit():
        raise ConfigError("a")
    assert "Traceback" in capsys.readouterr().err


def test_other_exceptions_are_not_hidden():
    with pytest.raises(ZeroDivisionError), clean_exit():
        raise ZeroDivisionError


def run_python(*argv):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "SHOW_TRACEBACK")}
    return subprocess.run([sys.executable, *argv], capture_output=True, text=True, env=env | {"COLUMNS": "80"}, timeout=60)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--lerning_rate", "1"], "error: unknown flag --lerning_rate: did you mean --learning_rate?; --help lists all"),
        (
            ["--global_batch_size", "0"],
            "error: --global_batch_size must be at least 1, not 0",
        ),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_2(argv, line):
    result = run_python(str(TEMPLATES / "lora_finetune.py"), *argv)
    assert result.returncode == 2
    assert result.stderr.splitlines() == [line]
    assert result.stdout == ""


@pytest.mark.parametrize(("on_cpu", "seen"), [("true", "''"), ("false", "'0'")])
def test_who_is_told_to_use_the_cpu_sees_no_gpu(on_cpu, seen):
    code = "import dataclasses, os; from shared.config import parse\n"
    code += "parse.parse_or_exit(dataclasses.make_dataclass('Config', [('x', int, 1)], frozen=True))\n"
    code += "print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    environment = os.environ | {"ACCELERATE_USE_CPU": on_cpu, "CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == seen, done.stderr


@pytest.mark.parametrize("name", ["pretrain", "lora_finetune"])
def test_help_lists_every_flag_with_unit_and_default_without_importing_torch(name, templates):
    code = (
        f"import runpy, sys\nsys.argv = ['x', '--help']\ntry:\n    runpy.run_path({str(TEMPLATES / name)!r} + '.py',"
        " run_name='__main__')\nexcept SystemExit as end:\n"
        "    print('EXIT', end.code, [m for m in ('torch', 'transformers', 'accelerate') if m in sys.modules])\n"
    )
    result = run_python("-c", code)
    assert result.stdout.splitlines()[-1] == "EXIT 0 []", result.stderr
    assert result.stderr == ""
    config_class = getattr(templates, name).Config
    for flag, _, _ in configs.fields(config_class):
        assert re.search(rf"--{flag}\b", result.stdout), flag
    text = " ".join(result.stdout.replace("│", " ").split())
    default = configs.flatten(config_class())["learning_rate"]
    assert f"(default: {default})" in text
    assert "Optimizer steps between checkpoints; one is always written at the end. (default:" in text
    assert "Samples in one forward and backward of one device" in text
    assert str(getattr(templates, name).__doc__).strip().splitlines()[0] in text


def test_help_as_a_command_exits_0():
    result = run_python(str(TEMPLATES / "lora_finetune.py"), "--help")
    assert result.returncode == 0
    assert result.stderr == ""
    assert "--lora_r INT" in result.stdout
