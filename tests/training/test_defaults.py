"""The settings that a run gets which gives none."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from shared.config import parse as configs
from shared.config.options import BatchConfig, OptimConfig
from shared.models.blocks import compile_blocks
from shared.parallel.strategy import strategy_of
from shared.process.errors import ConfigError
from shared.run import launch
from shared.run import setup as setups
from shared.run.setup import Setup
from shared.training import defaults, optim
from tests.conftest import load_template, run, run_here


@pytest.mark.parametrize(
    ("samples", "rows", "given", "size", "epochs"),
    [
        (192, 192, {}, 8, 3),  # a row a sample: the batch is halved once
        (500, 50, {}, 1, 3),  # packed: a row holds 10 samples
        (192, 48, {}, 2, 3),
        (40, 10, {}, 2, 6),  # more epochs, for 30 steps
        (20, 2, {}, 1, 10),  # at most 10 epochs, also where the steps stay few
        (5, 5, {}, 4, 10),  # never more rows than there are
        (5000, 5000, {}, 16, 3),
        (5000, 500, {}, 8, 3),
        (192, 48, {"global_batch_size": 16}, 16, 10),  # epochs follow the user's batch
        (192, 48, {"num_train_epochs": 1.0}, 2, 2),  # which `choose` leaves alone
    ],
)
def test_small_data_get_more_steps(samples, rows, given, size, epochs, monkeypatch):
    chosen = defaults.batch_and_epochs(BatchConfig(**given), samples, rows, most=16, least=8)
    assert chosen == {"global_batch_size": size, "num_train_epochs": epochs}
    monkeypatch.setenv("WORLD_SIZE", "4")
    BatchConfig(**defaults.batch_and_epochs(BatchConfig(), samples, rows, most=16, least=8)).micro_batch()  # it divides


def test_rates_fall_with_the_model():
    """The figures of docs/quality.md."""
    assert [defaults.lora_rate(width) for width in (64, 576, 2048, 4096, 8192)] == [2e-3, 1.3e-3, 4.9e-4, 2.9e-4, 1.7e-4]
    assert defaults.full_rate(4096) == 2.9e-5
    sizes = (800_000, 3_000_000, 125_000_000, 1_300_000_000)
    assert [defaults.pretraining_rate(size, trained=False) for size in sizes] == [5e-3, 3.9e-3, 6e-4, 1.9e-4]
    assert defaults.pretraining_rate(125_000_000, trained=True) == 2e-4


def run_of(template: str, *argv: str) -> Setup:
    """A run of a template before its processes start."""
    own = Setup.__new__(Setup)
    own.config, own._chosen, own._found = configs.parse(load_template(template).Config, argv), [], None
    own.unit, own.models = "images" if template == "image_classification" else "tokens", {"model": "model"}
    return own


def test_only_what_was_left_open_is_chosen_optimizers_by_name():
    own = run_of("lora_finetune", "--num_train_epochs", "2")
    config = own.set_defaults("the reason", learning_rate=1e-3, global_batch_size=4, max_steps=40)
    assert (config.optim.learning_rate, config.batch.global_batch_size) == (1e-3, 4)
    assert (config.batch.max_steps, config.batch.num_train_epochs) == (None, 2.0)  # a budget was given
    for budget in (("--max_steps", "0"), ("--max_tokens", "1000")):
        assert run_of("pretrain", *budget).set_defaults("the demo", max_steps=40).batch.max_steps != 40
    assert own.set_defaults("another reason", learning_rate=1e-5, global_batch_size=8) == config
    assert own._chosen == ["learning_rate 0.001, global_batch_size 4 (the reason)"]
    own = run_of("pretrain")
    assert own.set_defaults("random", optim="muon", learning_rate=1e-3).optim.optim == "muon"
    assert own._chosen == ["optim muon, learning_rate 0.001 (random)"]
    assert run_of("pretrain", "--optim", "sgd").set_defaults("random", optim="muon").optim.optim == "sgd"
    with pytest.raises(RuntimeError, match="no learning rate"):  # which nobody chose
        optim.build(torch.nn.Linear(2, 2), OptimConfig())


GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.fixture(autouse=True)
def compile_errors():
    """The process's settings are put back."""
    with torch._dynamo.config.patch(suppress_errors=False):
        yield


def compiling_run(monkeypatch, *argv: str, template="pretrain", device=GPU, before=None) -> tuple[Setup, list]:
    """(a run on a device that need not be there, what it compiles)"""
    own = run_of(template, *argv)
    compiled: list = []
    of_images = template == "image_classification"
    monkeypatch.setattr(setups, "compile_images", compiled.append if of_images else None)
    monkeypatch.setattr(setups, "compile_blocks", None if of_images else compiled.append)
    own._found = None if before is None else (None, {"settings": {"torch_compile": before}})
    own.accelerator = SimpleNamespace(distributed_type="NO", device=device, unwrap_model=lambda model: model)
    own.strategy = strategy_of(own.accelerator)
    return own, compiled


@pytest.mark.parametrize(
    ("device", "steps", "argv", "options", "compiled", "said"),
    [
        (GPU, 4_000, (), {}, True, "4,000 steps on a CUDA device"),
        (GPU, 500, (), {}, True, "500 steps on a CUDA device"),
        (GPU, 499, (), {}, False, "499 steps on a CUDA device"),
        (GPU, 2_999, (), {"template": "image_classification"}, False, "2,999 steps on a CUDA device"),
        (GPU, 3_000, (), {"template": "image_classification"}, True, "3,000 steps on a CUDA device"),
        (GPU, 4_000, (), {"one_shape": False}, False, "4,000 steps on a CUDA device"),
        (CPU, 4_000, (), {}, False, None),  # nothing is weighed there
        *((device, 0, ("--torch_compile",), {"before": False}, True, None) for device in (GPU, CPU)),
        *((device, 4_000, ("--no_torch_compile",), {"before": True}, False, None) for device in (GPU, CPU)),
        (GPU, 10, (), {"before": True}, True, "as it began"),
        (GPU, 4_000, (), {"before": False}, False, "as it began"),
        (CPU, 10, (), {"before": True}, True, None),
    ],
)
def test_long_runs_on_gpus_are_compiled(monkeypatch, device, steps, argv, options, compiled, said):
    """But a flag decides, and a run continues compiled or not as it began."""
    options = {"one_shape": True} | options
    one_shape = options.pop("one_shape")
    own, models = compiling_run(monkeypatch, *argv, device=device, **options)
    own._compile(steps, one_shape=one_shape)
    assert torch._dynamo.config.suppress_errors is (compiled and not argv)  # nobody asked for it
    assert own.config.speed.torch_compile is compiled and models == ["model"] * compiled
    assert [chosen.startswith(f"torch_compile {compiled} (") for chosen in own._chosen] == [True] * bool(said)
    assert said in (None, "as it began") or own._chosen == [f"torch_compile {compiled} ({said})"]


def test_without_a_compiler_nothing_is_compiled_and_a_note_says_so(monkeypatch, capsys):
    for name, value in (("PATH", "/nowhere"), ("CC", ""), ("CXX", "")):
        monkeypatch.setenv(name, value)
    for steps in (4_000, 10):
        own, models = compiling_run(monkeypatch)
        own._compile(steps, one_shape=True)
        assert own.config.speed.torch_compile is False and not models
        said = "no C compiler is installed, so nothing is compiled: apt install g++" in capsys.readouterr().err
        assert said is (steps == 4_000)


def test_what_is_asked_for_and_cannot_be_compiled_is_one_line_before_anything_is_loaded(monkeypatch, tmp_path):
    monkeypatch.setattr(launch.sysconfig, "get_path", lambda name: str(tmp_path))  # Python's headers are not there
    with pytest.raises(ConfigError, match="--torch_compile needs a compiler and Python's headers: apt install"):
        run_here("pretrain", "--torch_compile", "--model_name_or_path", "/nowhere", "--output_dir", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_that_cannot_be_compiled_trains_unless_that_was_asked_for(monkeypatch):
    for argv in ((), ("--torch_compile",)):
        own, _ = compiling_run(monkeypatch, *argv)
        monkeypatch.setattr(setups, "compile_blocks", compile_blocks)
        own.models = {"model": torch.nn.Linear(2, 2)}
        with pytest.raises(ConfigError, match="no list of equal blocks") if argv else contextlib.nullcontext():
            own._compile(4_000, one_shape=True)


def test_a_run_continues_with_what_it_chose(tiny_model, chat_file, tmp_path):
    """Two processes round a batch of 1 up to 2; a run that goes on with one keeps it, and ends alike."""
    flags = ("--model_name_or_path", tiny_model, "--train_file", chat_file, "--seq_length", 256, "--show_answers", 0)
    flags = (*flags, "--save_steps", 2, "--max_steps")
    run("lora_finetune", tmp_path, *flags, 2, processes=2)
    done = run("lora_finetune", tmp_path, *flags, 4, "--allow_changed", "max_steps")
    assert "2 rows = 1 process x" in done.output
    assert "by default" in done.summary and "global_batch_size 2" in done.summary and "LoRA, width 64" in done.summary
    assert done.manifest(2)["world_size"] == 2
    assert (done.manifest(4)["world_size"], done.manifest(4)["settings"]["global_batch_size"]) == (1, 2)
