"""One frozen config from YAML and the command line, or one clear line."""

import dataclasses
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, get_type_hints

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.config import options
from shared.config import parse as configs
from shared.config.options import BatchConfig, EvaluationConfig, SpeedConfig
from shared.config.types import Count, Free, Positive, Rule, Steps, within
from shared.data.options import DataConfig
from shared.images.options import ImageConfig
from shared.process import ranks, signals
from shared.process.errors import CleanExit, ConfigError
from shared.process.signals import clean_exit
from shared.text.options import ChatConfig, CorpusConfig
from tests.conftest import load_template, python

TEMPLATES = Path(__file__).parents[2] / "templates"


@dataclass(frozen=True)
class Group:
    """A group."""

    count: int = 1  # Things
    limit: int | None = None  # Things at most
    where_file: Path | None = None  # A place


@dataclass(frozen=True)
class Config:
    """For tests."""

    rate: float = 1.0
    label: str = "a"
    title: str | None = None
    words: tuple[str, ...] = ("x", "y")
    shuffle: bool = False
    careful: bool = True
    shape: Literal["round", "flat"] = "round"
    group: Group = Group()


@pytest.fixture(scope="module")
def templates():
    return SimpleNamespace(**{name: load_template(name) for name in ("pretrain", "lora_finetune", "image_classification")})


@pytest.fixture
def from_yaml(tmp_path):
    def parse(text, *argv, config_class=Config, config_last=False):
        path = tmp_path / "run.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return configs.parse(config_class, [*argv, f"--config={path}"] if config_last else ["--config", str(path), *argv])

    return parse


def refused(parse, *args, **kwargs) -> str:
    with pytest.raises(ConfigError) as error:
        parse(*args, **kwargs)
    message = str(error.value)
    assert message and "\n" not in message
    return message


# YAML and the command line -------------------------------------------------------------------------------------------


def test_yaml_and_the_command_line_give_the_same_frozen_config_and_the_command_line_wins(from_yaml, templates, monkeypatch):
    text = "rate: 0.5\nlabel: b\ntitle: t\nwords: [p, q, r]\nshuffle: true\ncareful: false\nshape: flat\ncount: 3\nlimit: 4"
    argv = "--rate 0.5 --label b --title=t --words p q r --shuffle --no_careful --shape flat --count=3 --limit 4"
    config = Config(0.5, "b", "t", ("p", "q", "r"), True, False, "flat", Group(3, 4))
    assert from_yaml(text) == config and configs.parse(Config, argv.split()) == config
    assert configs.parse(Config, []) == from_yaml("") == from_yaml("# nothing\n") == Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.group.count = 2
    text = "rate: 0.5\nwords: [p, q]\nshuffle: true\ncareful: false\ncount: 3\nlimit: 9\n"
    expected = Config(rate=0.25, words=("z",), shuffle=False, careful=True, group=Group(count=3, limit=None))
    argv = ["--rate", "0.25", "--words", "z", "--no-shuffle", "--careful", "--limit", "None"]
    assert from_yaml(text, *argv) == from_yaml(text, *argv, config_last=True) == expected
    monkeypatch.setenv("HOME", "/home/me")
    argv = ["--output_dir=~/run", "--model_name_or_path=~/a~b", "--sample_prompt=~/run"]
    config = configs.parse(templates.pretrain.Config, argv)
    assert config.checkpoint.output_dir == Path("/home/me/run")
    assert (config.model.model_name_or_path, config.sample_prompt) == ("/home/me/a~b", "~/run")


def test_every_spelling_of_a_switch_which_may_be_left_open(from_yaml):
    for argv in (["--shuffle"], ["--shuffle", "true"], ["--shuffle=True"]):
        assert configs.parse(Config, [*argv, "--rate", "2"]) == Config(rate=2.0, shuffle=True)
    for argv in (["--no_careful"], ["--no-careful"], ["--careful", "false"], ["--careful=False"]):
        assert configs.parse(Config, [*argv, "--rate", "2"]) == Config(rate=2.0, careful=False)
    for text, value in {"true": True, "yes": True, "'True'": True, "false": False, "no": False, "Off": False}.items():
        assert from_yaml(f"shuffle: {text}\n").shuffle is value
        assert from_yaml(f"torch_compile: {text}\n", config_class=SpeedConfig).torch_compile is value
    spellings = {"": None, "--torch_compile": True, "--no-torch-compile": False, "--torch-compile=no": False}
    for text, value in spellings.items():
        assert configs.parse(SpeedConfig, text.split()).torch_compile is value
    assert from_yaml("torch_compile: null\n", config_class=SpeedConfig).torch_compile is None
    assert from_yaml("torch-compile: true\n", "--no_torch_compile", config_class=SpeedConfig).torch_compile is False
    with pytest.raises(ConfigError, match="--torch_compile is true or false, not 'perhaps'"):
        configs.parse(SpeedConfig, ["--torch_compile", "perhaps"])


def test_numbers_in_every_spelling(from_yaml):
    for text in ("1e-4", "1E-4", ".0001", "'1e-4'", "1.0e-04"):
        assert from_yaml(f"rate: {text}\n").rate == configs.parse(Config, ["--rate", text.strip("'")]).rate == 1e-4
    for text in ("3e3", "3E+3", "3000.0", "3_000"):
        assert configs.parse(Config, ["--count", text, f"--limit={text}"]).group == Group(3000, 3000)
        assert from_yaml(f"count: {text}\nlimit: {text}\n").group == Group(3000, 3000)
    assert configs.parse(Config, ["--limit", "-1"]).group.limit == -1


def test_lists_null_and_text_that_yaml_could_misread(from_yaml):
    assert from_yaml("words: [p]\n").words == from_yaml("words: p\n").words == ("p",)
    assert from_yaml("words:\n- p\n- 2\n- yes\n").words == ("p", "2", "yes")
    assert from_yaml("words: []\nrate: 2.0\n") == Config(words=(), rate=2.0)
    assert configs.parse(Config, ["--words=p", "q", "--rate", "2"]) == Config(words=("p", "q"), rate=2.0)
    for null in ("null", "~", "", "None"):
        assert from_yaml(f"limit: {null}\ntitle: {null}\nwhere_file: {null}\n") == Config()
    for text in ("yes", "off", "2020-01-01", "0123", "1e-4"):
        assert from_yaml(f"label: {text}\n").label == text
    for label in ("a=b", "--rate", "-1", "true", " padded ", "two\nlines", "null", "é #", "a\0\x85\u2028\ufeff\x1b'\"#:😀"):
        read = from_yaml(yaml.safe_dump({"label": label, "words": [f"a {label}"]}))
        assert read == Config(label=label, words=(f"a {label}",))


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--lable x", "unknown flag --lable: did you mean --label?; --help all lists all"),
        ("--zzzzqqq", "unknown flag --zzzzqqq; --help all lists all; docs/coming_from.md has those of Trainer, TRL, timm"),
        (
            "--lable x --rats 1",
            "unknown flags --lable: did you mean --label?; --rats: did you mean --rate?; --help all lists",
        ),
        ("--no_label", "unknown flag --no_label: did you mean --label?; --help all lists all"),
        ("--bf16", "unknown flag --bf16: precision is the launcher's: accelerate launch --mixed_precision"),
        ("stray", "unexpected argument 'stray'"),
        ("--label -rate 1", "--label takes one value, not 2: -rate 1"),
        ("--words a -rate 1", "--words -rate: flags begin with --"),
        ("--label --rate 1", "--label needs a value"),
        ("--words", "--words needs a value"),
        ("--words a --words b", "--words is given twice"),
        ("--config a --config=b", "--config is given twice"),
        ("--config --rate 1", "--config needs a value"),
        ("--config /no/such.yaml", "--config /no/such.yaml: no such file"),
        ("--shuffle 1", "--shuffle is true or false, not '1'"),
        ("--no_shuffle=false", "--shuffle takes one value"),
        ("--rate nan", "--rate is a number, not 'nan'"),
        ("--rate=-inf", "--rate is a number, not '-inf'"),
        ("--limit 1.5", "--limit is a whole number, not '1.5'"),
        ("--count 1e400", "--count is a whole number, not '1e400'"),
        ("--shape square", "--shape is one of round, flat, not 'square'"),
        ("--where_file=", "--where_file is empty"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(argv, message):
    assert refused(configs.parse, Config, argv.split()).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\nruffle: true\n", ":2: unknown key 'ruffle': did you mean shuffle?"),
        ("group:\n  count: 1\n", ":1: unknown key 'group'"),
        ("rate: 1\n\nrate: 1\n", ":3: the key 'rate' is there twice"),
        ("rate: 1\ncount: many", ":2: --count is a whole number, not 'many'"),
        ("count: true", ":1: --count is a whole number, not 'true'"),
        ("rate: .nan", ":1: --rate is a number, not '.nan'"),
        ("rate: [1, 2]", ":1: --rate takes one value, not 2: 1 2"),
        ("words: ['']", ":1: --words is empty"),
        ("count:", ":1: --count is empty"),
        ("label:\n  a: 1\n", ":1: label: expected a value or a list of values; keys are flat"),
        ("words: [[a]]", ":1: words: expected a value or a list"),
        ("rate: !!python/object/apply:os.mkdir [made]", ":1: --rate is a number, not 'made'"),
        ("label: !!python/name:os.mkdir ''", ":1: --label is empty"),
        ("- rate\n", ": expected 'key: value' lines"),
        ("rate: 1\nlabel: 'open\n", ":3: not valid YAML"),
        ("label: \0", ": not valid YAML"),
        (b"label: \xe9\n", ": not valid YAML"),
        ("? [a]\n: b", ":1: unknown key"),
    ],
)
def test_a_mistake_in_yaml_is_one_line_with_file_and_line(from_yaml, tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    assert refused(from_yaml, text).startswith(f"{tmp_path}/run.yaml{message}")
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_what_other_programs_call_it_is_known(templates):
    for flag, then in {
        "lr": "did you mean --learning_rate?",
        "batch_size": "give --global_batch_size, the samples of a step, or --per_device_train_batch_size",
        "gradient_accumulation_steps": "it follows from --global_batch_size and --per_device_train_batch_size",
        "momentum": "0.9 of sgd, and 0.95 of muon",
        "dataset_num_proc": "did you mean --preprocessing_num_workers?",
    }.items():
        message = refused(configs.parse, templates.pretrain.Config, [f"--{flag}", "1"])
        assert message.startswith(f"unknown flag --{flag}: {then}")
    names = {name for path in TEMPLATES.glob("*.py") for name in configs.flags(load_template(path.stem).Config)}
    table = yaml.safe_load((TEMPLATES.parent / "shared/config/other_programs.yaml").read_text())
    assert {name for name in table.values() if " " not in name} <= names


def test_what_only_whole_models_need_is_no_flag_of_adapters(templates):
    message = refused(configs.parse, templates.lora_finetune.Config, ["--adam_beta2", "0.95", "--async_save"])
    assert message.startswith("unknown flags --adam_beta2: 0.999 for adapters; full_finetune.py has the flag; --async_save")
    config = templates.lora_finetune.Config()
    assert (config.optim.adam_beta2, config.speed.async_save) == (0.999, False) and len(configs.flags(type(config))) <= 76
    assert {"adam_beta2", "layer_decay", "async_save"} <= configs.flags(templates.pretrain.Config).keys()


def test_help_is_help_wherever_it_stands(capsys):
    for argv in (["--label", "-h"], ["--count", "x", "--help"], ["-h", "--config", "/nowhere"]):
        with pytest.raises(SystemExit) as end:
            configs.parse(Config, argv)
        assert not end.value.code and "--label" in capsys.readouterr().out


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(lambda text: text != "None")


@settings(deadline=None, max_examples=60)
@given(
    st.builds(
        Config,
        *(st.floats(allow_nan=False, allow_infinity=False), TEXT, st.none() | TEXT),
        st.lists(TEXT.filter(lambda text: text[0] != "-"), max_size=3).map(tuple),
        *(st.booleans(), st.booleans(), st.sampled_from(["round", "flat"])),
        st.builds(Group, st.integers(-9, 10**15), st.none() | st.integers(0, 9), st.none() | TEXT.map(Path("a").joinpath)),
    )
)
def test_a_saved_config_is_read_back_equal(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "saved.yaml"
    configs.save(config, path)
    assert configs.parse(Config, ["--config", str(path)]) == config


@pytest.mark.parametrize("name", ["pretrain", "lora_finetune", "image_classification"])
def test_a_template_saves_every_field_flat_and_reads_it_back(templates, tmp_path, name):
    (tmp_path / "a b.txt").write_text("x")
    config = configs.replace(getattr(templates, name).Config(), output_dir=Path("a/b"), learning_rate=1e-5)
    if name == "pretrain":
        config = configs.replace(config, train_file=(str(tmp_path / "a b.txt"),) * 2)
    configs.save(config, tmp_path / "run.yaml")
    content, names = yaml.safe_load((tmp_path / "run.yaml").read_text()), [*configs.flags(type(config))]
    assert list(content) == names and len(set(names)) == len(names)
    assert (content["output_dir"], content["learning_rate"]) == ("a/b", 1e-5)
    assert configs.parse(type(config), ["--config", str(tmp_path / "run.yaml")]) == config


# Groups --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bounded:
    """Numbers."""

    half: Annotated[float, within(at_least=0, below=0.5)] = 7.0  # of the template: not asked
    many: tuple[Positive, ...] = ()
    open: Free[Count | None] = None
    steps: Steps[int | float | None] = None
    even: Free[Annotated[int, Rule("is even", lambda n: n % 2 == 0)]] = 2


def test_a_type_carries_bounds_and_freedom(from_yaml, tmp_path, templates):
    assert configs.parse(Bounded, []) == Bounded()
    argv = ["--half=0", "--many", "1", "2.5", "--open", "None", "--steps=0.5", "--even=1e3"]
    given = configs.parse(Bounded, argv)
    assert given == Bounded(0.0, (1.0, 2.5), None, 0.5, 1000)
    for argv, message in {
        "--half 0.5": "--half must be at least 0 and below 0.5, not 0.5",
        "--many 1 0": "--many must be above 0, not 0.0",
        "--open 0": "--open must be at least 1, not 0",
        "--steps 0": "--steps must be above 0, not 0",
        "--steps 1.5": "--steps is a whole number of steps or, below 1, a share of the run, not 1.5",
        "--even 3": "--even is even, not 3",
    }.items():
        assert refused(configs.parse, Bounded, argv.split()) == message
    assert refused(from_yaml, "steps: 2\nopen: -1\n", config_class=Bounded).startswith(f"{tmp_path}/run.yaml:2: --open")
    assert refused(from_yaml, "open: 1\n", "--open", "0", config_class=Bounded) == "--open must be at least 1, not 0"
    assert configs.free_fields(Bounded) == {"open", "even"}
    free = configs.free_fields(templates.pretrain.Config)
    assert {"tokenizer_name", "train_file", "save_steps", "final_dtype"} <= free
    assert not {"eval_samples", "learning_rate", "seed", "text_column"} & free  # the split depends on eval_samples
    assert "eval_samples" in configs.free_fields(templates.lora_finetune.Config)


OUT_OF_RANGE = {
    "BatchConfig": "global_batch_size=-1 per_device_train_batch_size=0 per_device_eval_batch_size=-1 max_steps=-1 "
    "num_train_epochs=-0.5 seed=4294967296 dataloader_num_workers=-1",
    "FullOptimConfig": "learning_rate=0 weight_decay=-1 adam_beta1=1 warmup_steps=-1 min_lr_ratio=2 max_grad_norm=-1 "
    "layer_decay=0 max_skipped_steps=-1",
    "FullSpeedConfig": "ddp_timeout=0",
    "EvaluationConfig": "eval_steps=0 early_stopping_patience=-1 ema_decay=1",
    "CheckpointConfig": "save_steps=0 save_total_limit=0",
    "LogConfig": "logging_steps=0",
}


def test_every_number_has_bounds_and_what_is_outside_is_refused():
    for group, flags in OUT_OF_RANGE.items():
        for flag in flags.split():
            message = refused(configs.parse, getattr(options, group), [f"--{flag}"])
            assert message.startswith(f"--{flag.split('=')[0]} must be ")
    for path in TEMPLATES.glob("*.py"):
        for name, flag in configs.flags(load_template(path.stem).Config).items():
            assert not {int, float} & {*flag.parts} or any(isinstance(part, Rule) for part in flag.parts), name


SIGNED = "https://h/a.jsonl?X-Amz-Signature=0123456789abcdef"


@pytest.mark.parametrize(
    ("group", "values", "message"),
    [
        (BatchConfig, {"max_steps": 1, "num_train_epochs": 1.0}, "--max_steps and --num_train_epochs"),
        (EvaluationConfig, {"early_stopping_patience": 1, "metric_for_best_model": "none"}, "patience needs"),
        (DataConfig, {"train_file": ("a",), "dataset_name": "b"}, "--train_file and --dataset_name"),
        (DataConfig, {"validation_file": ("a",)}, "--validation_file needs --train_file or --dataset_name"),
        (DataConfig, {"dataset_name": ("hf://datasets/org/name",)}, "--dataset_name takes a name on the Hub or a folder"),
        (DataConfig, {"dataset_config_name": "en"}, "--dataset_config_name needs --dataset_name"),
        (DataConfig, {"train_split_name": "test"}, "--train_split_name needs --dataset_name"),
        (ImageConfig, {"validation_split_name": "test"}, "--validation_split_name needs --dataset_name"),
        (ImageConfig, {"train_dir": (Path("/tmp"), Path("/tmp/.")), "mix_weights": (1, 2)}, "--train_dir names one twice"),
        (DataConfig, {"train_file": 2 * (SIGNED,), "mix_weights": (1, 2)}, "--train_file names one twice"),
        (CorpusConfig, {"streaming": True, "preprocess_only": True}, "--streaming does not work with --preprocess_only"),
        (ChatConfig, {"train_file": ("no/such.txt",)}, "--train_file no/such.txt: no such file"),
    ],
)
def test_a_group_refuses_what_cannot_work(group, values, message):
    assert message in refused(group, **values)


def test_the_default_cadence_is_that_of_a_demo_in_a_short_run_and_a_share_of_a_long_one(templates):
    """20B tokens in steps of 1M: 50 checkpoints of 12 GB, where one each 50 steps would write 4.6 TB."""
    steps = {"lora_finetune": (20, 20), "pretrain": (50, 50)}
    for name, (evaluations, saves) in steps.items():
        config = getattr(templates, name).Config()
        for total, often in ((1, 1), (39, 20), (99, evaluations), (400, evaluations)):  # twice, for a curve
            assert (config.evaluation.every(total, 7), config.checkpoint.every(total)) == (often, saves)
        assert 20_000 // config.checkpoint.every(20_000) == saves
    assert (config.evaluation.every(19_073, None), config.checkpoint.every(19_073)) == (381, 381)
    given = configs.parse(templates.pretrain.Config, ["--eval_steps", "50", "--save_steps", "0.1"])
    assert (given.evaluation.every(10**6, None), given.checkpoint.every(10**6)) == (50, 10**5)
    assert EvaluationConfig(eval_steps=None).every(10**6, 7) == 7


@pytest.mark.parametrize(
    ("template", "argv", "message"),
    [
        ("pretrain", "--model_preset 9M", "--model_preset 9M"),
        ("pretrain", "--gradient_checkpointing 0", "is none, full, offload or a number of blocks, not '0'"),
        ("pretrain", "--validation_split_percentage 100", "--validation_split_percentage must be above 0 and below 100"),
        ("pretrain", "--vocab_size 299", "--vocab_size must be at least 300"),
        ("pretrain", "--config_name a --model_name_or_path b", "--config_name and --model_name_or_path"),
        ("pretrain", "--max_tokens 10 --max_steps 1", "--max_tokens and --max_steps"),
        ("pretrain", "--seq_length 0", "--seq_length must be at least"),
        ("lora_finetune", "--lora_r 0", "--lora_r must be at least 1"),
    ],
)
def test_each_template_refuses_what_cannot_work(templates, template, argv, message):
    assert message in refused(configs.parse, getattr(templates, template).Config, argv.split())


def test_the_batch_must_divide_over_the_processes_that_read_data(templates, monkeypatch):
    """Those that share a model read the same."""
    monkeypatch.setenv("WORLD_SIZE", "3")
    message = refused(configs.parse, templates.pretrain.Config, ["--global_batch_size", "32"])
    assert "32 is not a multiple of the 3 processes that read data: 30 or 33 would be" in message
    assert "2 is not a multiple of the 3 processes that read data: 3 would be" in refused(BatchConfig(2, 4).micro_batch)
    assert BatchConfig(24, 4).micro_batch() == (4, 2)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ranks.data_parallel_size() == 8
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for name, size in {"DP_REPLICATE": 2, "DP_SHARD": 2, "TP": 2, "CP": 1, "SP": 1}.items():
        monkeypatch.setenv(f"PARALLELISM_CONFIG_{name}_SIZE", str(size))
    assert ranks.data_parallel_size() == 4
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "4")
    assert "dp_replicate_size 2 x dp_shard_size 2 x tp_size 4" in refused(ranks.data_parallel_size)


@settings(deadline=None, max_examples=100)
@given(size=st.integers(1, 300), per_device=st.integers(1, 64), world=st.integers(1, 16))
def test_the_micro_batch_is_the_largest_that_makes_up_the_global_batch(size, per_device, world):
    batch = BatchConfig(size, per_device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(world))
        if size % world:
            assert f"multiple of the {world} processes" in refused(batch.micro_batch)
            return
        rows, accumulation = batch.micro_batch()
    assert rows <= per_device and rows * accumulation * world == size
    share, both_even = size // world, size // world % 2 == 0 and per_device % 2 == 0
    assert rows % 2 == 0 or not both_even
    larger = [n for n in range(rows + 1, min(per_device, share) + 1) if share % n == 0]
    assert not [n for n in larger if n % 2 == 0 or not both_even]


def test_total_steps_is_the_budget_that_was_given(from_yaml, templates):
    """On the command line it replaces that of the file."""
    assert BatchConfig(max_steps=7).total_steps(100) == 7
    assert BatchConfig(num_train_epochs=2.5).total_steps(100) == 250
    assert BatchConfig(num_train_epochs=0.001).total_steps(100) == 1
    assert BatchConfig(num_train_epochs=1.5).total_steps(3) == 5  # rounded up: no part of the budget is lost
    assert BatchConfig().total_steps(100) == 100
    given, template = "num_train_epochs: 3\nseed: 7\n", templates.pretrain.Config
    batch = from_yaml(given, "--max_steps", "10", config_class=template).batch
    assert (batch.max_steps, batch.num_train_epochs, batch.seed) == (10, None, 7)
    assert from_yaml(given, config_class=template).batch.num_train_epochs == 3


# Exit codes and what is printed --------------------------------------------------------------------------------------


class Stop(CleanExit):
    exit_code = 143


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("a\n\x1b[2J\u2028\ud800 é🙂"), 2, "error: a\\n\\x1b[2J\\u2028\\ud800 é🙂\n"),
        (Stop("saved"), 143, "saved\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_clean_exit_is_one_line_and_its_code(capsys, monkeypatch, error, code, line):
    with pytest.raises(SystemExit) as end, clean_exit():
        raise error
    assert end.value.code == code and capsys.readouterr() == ("", line)
    with pytest.raises(ZeroDivisionError), clean_exit():
        raise ZeroDivisionError


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


def test_a_mistake_is_one_line_and_who_is_told_to_use_the_cpu_sees_no_gpu():
    done = python(TEMPLATES / "lora_finetune.py", "--lerning_rate", "1")
    line = "error: unknown flag --lerning_rate: did you mean --learning_rate?; --help all lists all\n"
    assert (done.returncode, done.stderr, done.stdout) == (2, line, "")
    code = "import dataclasses, os; from shared.config import parse\n"
    code += "for os.environ['ACCELERATE_USE_CPU'] in ('false', 'true'):\n"
    code += "    parse.parse_or_exit(dataclasses.make_dataclass('Config', [('x', int, 1)], frozen=True))\n"
    code += "    print(repr(os.environ['CUDA_VISIBLE_DEVICES']))"
    done = python("-c", code, env=os.environ | {"CUDA_VISIBLE_DEVICES": "0"})
    assert done.stdout.split() == ["'0'", "''"], done.stderr


def test_help_is_two_screens_of_usual_flags(monkeypatch, capsys):
    """Each is explained as in --help all, which the last line names."""
    monkeypatch.setattr(configs.start, "begin", lambda: None)
    monkeypatch.setattr(sys, "argv", ["x", "--help"])
    monkeypatch.setenv("COLUMNS", "100")
    seen = set()
    for path in TEMPLATES.glob("*.py"):
        template = load_template(path.stem)
        monkeypatch.setitem(sys.modules, "__main__", template)
        with pytest.raises(SystemExit) as end:
            configs.parse_or_exit(template.Config)
        said = capsys.readouterr().out
        known = configs.flags(template.Config)
        assert not end.value.code and 60 < len(said.splitlines()) <= 100 and max(map(len, said.splitlines())) <= 100
        shown = set(re.findall(r"^  --(\w+)", said, re.MULTILINE))
        assert shown == {*configs.USUAL} & known.keys() and said.count("(default:") >= len(shown)
        assert f"--help all has all {len(known)} flags" in said
        seen |= shown
        with pytest.raises(SystemExit):
            configs.parse(template.Config, ["--help"])
        said = capsys.readouterr().out
        for name, group in get_type_hints(template.Config).items():
            if dataclasses.is_dataclass(group):  # each says what it is, not what the comment of the flag before it says
                box = re.search(rf" {name} options\W+(\w.*)", said)
                assert box and box[1].startswith(str(group.__doc__).split(".")[0][:40]), (path, name)
    assert seen == {*configs.USUAL}


@pytest.mark.parametrize("name", ["pretrain", "lora_finetune"])
def test_help_lists_every_flag_with_unit_and_default_without_importing_torch(name, templates):
    code = (
        "import runpy, sys\n"  # the package is not installed
        "sys.meta_path = [finder for finder in sys.meta_path if 'Editable' not in repr(finder)]\n"
        f"sys.path = [folder for folder in sys.path if folder not in ('', {str(TEMPLATES.parent)!r})]\n"
        f"sys.argv = ['x', '--help', 'all']\ntry:\n    runpy.run_path({str(TEMPLATES / name)!r} + '.py',"
        " run_name='__main__')\nexcept SystemExit as end:\n"
        "    print('EXIT', end.code, [m for m in ('torch', 'transformers', 'accelerate') if m in sys.modules])\n"
    )
    # a new interpreter: nothing is imported yet
    env = os.environ | {"COLUMNS": "80"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=60)
    assert result.stdout.splitlines()[-1] == "EXIT 0 []", result.stderr
    assert result.stderr == ""
    config_class = getattr(templates, name).Config
    for flag in configs.flags(config_class):
        assert re.search(rf"--{flag}\b", result.stdout), flag
    text = " ".join(result.stdout.replace("│", " ").split())
    default = configs.flatten(config_class())["learning_rate"]
    assert f"(default: {default})" in text
    assert "20 times in a run of more than 400 steps. One more comes at the end. (default: " in text
    assert "Samples in one forward and backward of one device" in text
    assert str(getattr(templates, name).__doc__).strip().splitlines()[0] in text
    assert not re.search(r"--\w+ [^-]*?STR\]? \(default", text)  # each flag says what it is
