"""Tiny models and data made here, and the real `accelerate launch` on CPU processes."""

import array
import contextlib
import functools
import gc
import importlib.util
import io
import json
import os
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import IO, ClassVar
from unittest import mock

import pytest

# Before torch: the tests compute on the CPU, and parts of torch would use a GPU that is there.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

from shared.config.options import BatchConfig, CheckpointConfig, SpeedConfig
from shared.config.types import Free
from shared.process.signals import STOP_SIGNALS
from tests.launcher import blank, fewer_tokens
from tools.extras import EXTRAS, extra_files
from tools.new import imports

ROOT = Path(__file__).resolve().parent.parent
SHAPE = "hidden_size=64,num_hidden_layers=2,num_attention_heads=4,num_key_value_heads=2,intermediate_size=128"
WORDS = "the model reads a line of text and says what comes next since it saw many before".split()  # noqa: SIM905


def _keep_to_own_cores() -> None:
    """Under pytest-xdist, give this process and all that it starts a share of the cores.

    Otherwise single processes compute on all cores at once, and OpenMP's threads spend most of their time waiting for
    one that the other worker's have pushed aside.
    """
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if worker and workers and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[int(worker.removeprefix("gw")) :: int(workers)] or cores)


_keep_to_own_cores()


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported stays: Python's collector has nothing to look for in it, now or during the tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object):
    """Each worker has its part of the tests in their order, so that a module's fixtures are made once, and then helps."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


# An extra may be deleted ------------------------------------------------------------------------------------------------

MISSING = [extra for extra in EXTRAS if not extra_files(extra)]


class Missing(types.ModuleType):
    """In place of a deleted extra, or of what a test imports from it: whoever uses it fails, and so is skipped."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> "Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing(self.__name__)

    def __bool__(self) -> bool:
        return False  # as `launch.optional` finds it: a run does without

    def __call__(self, *_: object, **__: object) -> None:
        raise ImportError(f"{self.__name__.replace('.', '/')} is not in this project")


class FindsMissing:
    """Imports deleted extras as `Missing`."""

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        is_missing = name.startswith("shared.extras.") and name.split(".")[2] in MISSING
        return ModuleSpec(name, self, is_package=True) if is_missing else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> Missing:
        return Missing(".".join(spec.name.split(".")[:3]))

    def exec_module(self, module: types.ModuleType) -> None:
        pass


if MISSING:
    sys.meta_path.insert(0, FindsMissing())  # type: ignore[arg-type]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    """A test that fails because the extra which it asks for was deleted is skipped, with the line that says so."""
    report = yield
    said = re.findall(r"shared/extras/(\w+) is not in this project", report.longreprtext) if report.failed else []
    if missing := [extra for extra in said if extra in MISSING]:
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: extras/{missing[0]} was deleted")
    return report


@pytest.fixture(scope="session", autouse=True)
def offline(tmp_path_factory):
    """No network, no tracker's login, and one cache of prepared data for the whole session."""
    os.environ |= {
        "TEMPLATES_CACHE": str(tmp_path_factory.mktemp("cache")),
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "ACCELERATE_USE_CPU": "true",
    }
    for name in ("RANK", "WORLD_SIZE"):  # tests are of one process, unless they say otherwise
        os.environ.pop(name, None)
    yield
    LAUNCHER.close()
    gc.unfreeze()  # or extensions complain of leaks at the end


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    """Prepared data of this test alone."""
    monkeypatch.setenv("TEMPLATES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def slow(*values: object):
    """A case of `parametrize` that the exhaustive tier alone runs: `pytest -m slow`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def instead(flags: Sequence, flag: str, value: object) -> tuple:
    """These flags with another value of one."""
    at = flags.index(flag) + 1
    return (*flags[:at], value, *flags[at + 1 :])


def sentence(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(words))


def write_lines(path: Path, records: Iterable[object]) -> Path:
    """Records as JSON lines."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    """57 documents of 5 to 80 words, JSON lines with a `text` key."""
    rng = random.Random(0)
    records = [{"text": sentence(rng, rng.randint(5, 80))} for _ in range(57)]
    return write_lines(tmp_path_factory.mktemp("text") / "text.jsonl", records)


@pytest.fixture(scope="session")
def chat_file(tmp_path_factory) -> Path:
    """23 conversations whose answers have 1 to 60 words, so that target tokens differ much from rank to rank."""
    rng = random.Random(1)
    rows = []
    for number in range(23):
        answer = sentence(rng, 1 if number % 3 else rng.randint(30, 60))
        rows.append({"role": "user", "content": sentence(rng, rng.randint(1, 8))})
        rows[-1] = {"messages": [rows[-1], {"role": "assistant", "content": answer}]}
    return write_lines(tmp_path_factory.mktemp("chats") / "chats.jsonl", rows)


@pytest.fixture(scope="session")
def user_files(tmp_path_factory, chat_file) -> Path:
    """A folder of what users have: chats.jsonl, pairs.jsonl, problems.jsonl, names.jsonl, reviews.csv."""
    folder = tmp_path_factory.mktemp("files")
    shutil.copy(chat_file, folder / "chats.jsonl")
    turns = [[turn["content"] for turn in json.loads(line)["messages"]] for line in chat_file.read_text().splitlines()]
    pairs = ({"prompt": user, "chosen": answer, "rejected": "no"} for user, answer in turns)
    write_lines(folder / "pairs.jsonl", pairs)
    problems = ({"question": f"{number} + 2 =", "answer": str(number + 2)} for number in range(40))
    write_lines(folder / "problems.jsonl", problems)
    write_lines(folder / "names.jsonl", [{"tokens": ["at", "home"], "tags": ["O", "B-LOC"]}] * 40)
    rows = [f"{answer},{'long' if len(answer) > 99 else 'short'}" for _, answer in turns]
    (folder / "reviews.csv").write_text("text,label,review,sentiment\n" + "".join(f"{row},{row}\n" for row in rows))
    return folder


def make_model(folder: Path, **shape: int) -> Path:
    """A Llama of two blocks with random weights, and a tokenizer, in the format of the Hub."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from shared.text.corpus import train_tokenizer

    rng = random.Random(2)
    tokenizer = train_tokenizer([sentence(rng, 50) for _ in range(50)], vocab_size=320)
    torch.manual_seed(0)
    usual = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **usual | {"intermediate_size": 128} | shape,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def put_a_token_before_texts(tokenizer):
    """As the tokenizers of Llama 3 and Gemma do."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.add_special_tokens({"bos_token": "<s>"})
    single = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = single
    return tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def tokenizer(tiny_model):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture
def cpu_state() -> None:
    """Accelerate's state, which a run in this process has perhaps removed."""
    from accelerate import PartialState

    PartialState(cpu=True)


def encoded(image, kind: str, **options: object) -> bytes:
    """A picture as a file of this kind."""
    into = io.BytesIO()
    image.save(into, kind, **options)
    return into.getvalue()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """checkpoint(family): the folder of a family's small checkpoint (model_families.py), and its class."""
    from tests.model_families import make

    root = tmp_path_factory.mktemp("families")
    return functools.cache(lambda family: (root / family, make(family, root / family, more_weights=True)))


def paint(path: Path, kinds: int | Sequence[int], number: int, size: tuple[int, int]) -> None:
    """A picture whose class, or classes, show in where it is bright, with noise."""
    import numpy as np
    from PIL import Image

    kinds = [kinds] if isinstance(kinds, int) else kinds
    pixels = np.random.default_rng((*kinds, number)).integers(0, 90, (size[1], size[0], 3))
    height = size[1] // 3
    for kind in kinds:
        pixels[kind * height : (kind + 1) * height, :, kind] += 150
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory) -> Path:
    """53 training and 17 validation pictures of 3 classes: multiples of nothing, of many sizes."""
    folder = tmp_path_factory.mktemp("images")
    names = ("cat", "dog", "owl")
    for split, count in (("train", 53), ("val", 17)):
        for number in range(count):
            size = (20 + 7 * number % 23, 18 + 5 * number % 19)
            paint(folder / split / names[number % 3] / f"{number}.png", number % 3, 1000 * count + number, size)
    return folder


@pytest.fixture(scope="session")
def architectures(tmp_path_factory) -> Path:
    """Folders of tiny architectures: convnext, vit and dinov2 (LayerNorm), resnet (BatchNorm), timm (a ResNet of timm's)."""
    from transformers import ConvNextConfig, Dinov2Config, ResNetConfig, TimmWrapperConfig, ViTConfig

    folder = tmp_path_factory.mktemp("architectures")
    attention = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
    configs = {
        "convnext": ConvNextConfig(num_stages=2, hidden_sizes=[16, 32], depths=[1, 2], patch_size=2),
        "vit": ViTConfig(**attention, image_size=16, patch_size=4, hidden_dropout_prob=0.1),
        "dinov2": Dinov2Config(**attention, image_size=16, patch_size=4, use_swiglu_ffn=True),
        "resnet": ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic"),
        "timm": TimmWrapperConfig(architecture="resnet10t"),
    }
    for name, config in configs.items():
        config.save_pretrained(folder / name)
    return folder


def save_classifier(architecture: Path, folder: Path, classes: tuple[str, ...] = ("cat", "dog", "owl")) -> Path:
    """A folder with random weights of one of `architectures` and an image processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageClassification, ConvNextImageProcessor

    config = AutoConfig.from_pretrained(architecture)
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: number for number, name in config.id2label.items()}
    torch.manual_seed(0)
    AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    ConvNextImageProcessor().save_pretrained(folder)
    return folder


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


@pytest.fixture(scope="session")
def machines():
    """Two machines on one: names of two network namespaces joined by a cable, whose addresses are 10.77.0.1 and .2."""
    names = [f"tmpl{os.getpid()}{letter}" for letter in "ab"]
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    try:
        for name in names:
            ip(f"netns add {name}")
        ip(f"link add eth0 netns {names[0]} type veth peer name eth0 netns {names[1]}")
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    for number, name in enumerate(names):
        ip(f"-n {name} addr add 10.77.0.{number + 1}/24 dev eth0")
        ip(f"-n {name} link set eth0 up")
        ip(f"-n {name} link set lo up")
    yield names
    for name in names:
        ip(f"netns del {name}")


def processes_on(machine: str) -> list[int]:
    """Of one of `machines`."""
    return [int(pid) for pid in subprocess.run(["ip", "netns", "pids", machine], capture_output=True).stdout.split()]


@dataclass(frozen=True)
class SmallConfig:
    """The part of a template's config that a Checkpointer looks at."""

    eval_steps: Free[int] = 5
    batch: BatchConfig = field(default_factory=BatchConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


@dataclass
class Run:
    """What a run left behind."""

    folder: Path
    returncode: int
    output: str

    @property
    def summary(self) -> str:
        """All of it: the console shows less."""
        return (self.folder / "summary.txt").read_text()

    @property
    def rows(self) -> list[dict]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def losses(self) -> dict[int, float]:
        return {row["step"]: row["loss"] for row in self.rows if "loss" in row}

    @property
    def evaluation(self) -> dict:
        return json.loads((self.folder / "evaluation.json").read_text())

    def each(self, key: str) -> list:
        """The values that the log has for it."""
        return [row[key] for row in self.rows if key in row]

    def last(self, key: str) -> float:
        return self.each(key)[-1]

    def manifest(self, step: int) -> dict:
        return json.loads((self.folder / f"checkpoint-{step:06d}" / "MANIFEST.json").read_text())

    def weights(self, name: str = "final") -> dict:
        from safetensors.torch import load_file

        (path,) = (self.folder / name).glob("*.safetensors")
        return load_file(path)


def exit_of(folder: Path) -> dict:
    """How a run has ended."""
    return json.loads((folder / "exit.json").read_text())


def free_port() -> int:
    """A port to listen on, outside the range from which outgoing connections take theirs."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def command(
    template: str, folder: Path, *args: object, processes: int = 1, config: str | None = None, precision: str = "no"
) -> list[str]:
    """The arguments of `accelerate launch` for a template, in fp32; several processes rehearse `config` (ddp) on CPU."""
    launcher: list[object] = []
    if processes > 1 or config:
        file = ROOT / "accelerate_configs" / f"{config or 'ddp'}.yaml"
        launcher += ["--config_file", file, "--mixed_precision", precision]
        launcher += ["--num_processes", processes, "--main_process_port", free_port()]
    elif precision != "no":
        launcher += ["--cpu", "--mixed_precision", precision]
    common = ["--output_dir", folder, "--report_to", "none", "--logging_steps", 1]
    return [*map(str, [*launcher, ROOT / "templates" / f"{template}.py", *common, *args])]


# As `accelerate-launch` is: what `accelerate launch` runs after importing timm and others for commands that are not used.
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]


class Started:
    """A process that tests/launcher.py has forked, with what the tests use of `subprocess.Popen`."""

    def __init__(self, address: str, words: list[str], env: dict[str, str], cwd: Path, outputs: tuple[int, int]) -> None:
        self.words, self.returncode = words, None
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(address)
        request = {"words": words, "env": env, "cwd": str(cwd), "cores": sorted(os.sched_getaffinity(0))}
        descriptors = array.array("i", outputs)
        self.connection.sendmsg([json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        self.pid = int.from_bytes(self.connection.recv(4))  # also its group's

    def poll(self, timeout: float = 0) -> int | None:
        """Its exit code, or None if it still runs after so many seconds."""
        if self.returncode is None and select.select([self.connection], [], [], timeout)[0]:
            self.returncode = int.from_bytes(self.connection.recv(4), signed=True)
            self.connection.close()
        return self.returncode

    def wait(self, timeout: float = 600) -> int:
        if self.poll(timeout) is None:
            raise subprocess.TimeoutExpired(self.words, timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


class Launcher:
    """Client of tests/launcher.py, which is started at the first run, perhaps with more environment and imports."""

    process: subprocess.Popen | None = None

    def __init__(self, environment: dict[str, str] | None = None, preloaded: tuple[str, ...] = ()) -> None:
        self.environment, self.preloaded = environment or {}, preloaded

    def address(self) -> str:
        """The socket of the program, which runs from now on."""
        if self is LAUNCHER and "TESTS_LAUNCHER" in os.environ:
            return os.environ["TESTS_LAUNCHER"]  # of one that runs already: benchmarks/mutants.py
        if self.process is None:
            self.path = os.path.join(tempfile.mkdtemp(), "launcher")
            script = [sys.executable, str(ROOT / "tests/launcher.py"), self.path, *self.preloaded]
            pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
            self.process = subprocess.Popen(script, text=True, env=os.environ | self.environment, **pipes)
            assert self.process.stdout is not None
            assert "ready\n" in self.process.stdout  # after what libraries say when they are imported
        return self.path

    def start(self, words: Sequence[object], stdout: IO, stderr: IO, env: dict | None = None, cwd: Path = ROOT) -> Started:
        """`python WORDS`: its processes, too, are forks, if it is -m or -c that starts them, by sys.executable or name."""
        words, outputs = [*map(str, words)], (stdout.fileno(), stderr.fileno())
        return Started(self.address(), words, dict(os.environ if env is None else env), cwd, outputs)

    def run(self, argv: list[str], env: dict[str, str], timeout: float = 600, cwd: Path | None = None) -> tuple[int, str]:
        """(exit code, output) of `accelerate launch ARGV`; all its processes are killed when it takes too long."""
        with tempfile.TemporaryFile() as output:
            words = ["-m", "accelerate.commands.launch", *argv]
            process = self.start(words, output, output, env, cwd or Path.cwd())
            code = process.poll(timeout)
            if code is None:
                os.killpg(process.pid, signal.SIGTERM)  # the launcher ends its workers
                code = -signal.SIGTERM
            output.seek(0)
            return code, output.read().decode(errors="replace")

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            shutil.rmtree(Path(self.path).parent)


LAUNCHER = Launcher()


def python(*words: object, env: dict | None = None, cwd: Path = ROOT, timeout: float = 600) -> subprocess.CompletedProcess:
    """`python WORDS`, as by `subprocess.run`, but forked with the imports done: for what is not about start-up itself."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = LAUNCHER.start(words, stdout, stderr, env, cwd)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
    return subprocess.CompletedProcess(process.words, process.returncode, *texts)


def shown(folder: Path, *words: object, code: int = 0) -> str:
    """What `python -m shared WORDS` prints in a folder; or says, where it is to end with another code."""
    env = launch_environment(dict(os.environ) | {"PYTHONPATH": str(ROOT)})
    done = python("-m", "shared", *words, cwd=folder, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def launch_environment(env: dict[str, str] | None) -> dict[str, str]:
    """The environment of a launch; with a fault, its actions can be imported (fault_actions.py)."""
    result = os.environ | (env or {})
    return result | {"PYTHONPATH": str(ROOT)} if result.get("TEMPLATES_FAULT") else result


def run(template: str, folder: Path, *args: object, check: bool = True, env: dict | None = None, **kwargs) -> Run:
    """Launch a template and wait for it; `check` asserts exit code 0. Pictures are blank and samples of text short, but
    those of a run by default, or with TESTS_PAINT in `env`.
    """
    paints = not args or "TESTS_PAINT" in (env or {})
    env = launch_environment(env) | ({} if paints else {"TESTS_SPARE": "1"})
    saved = [max(folder.glob("checkpoint-*/MANIFEST.json"), default=None)]
    code, output = LAUNCHER.run(command(template, folder, *args, **kwargs), env)
    if check:
        assert code == 0, output
        saved.append(max(folder.glob("checkpoint-*/MANIFEST.json"), default=None))
        if saved[0] != saved[1] and (expected := strategy(template, **kwargs)):
            manifest = json.loads(saved[1].read_text())
            assert manifest["strategy"].startswith(expected) and manifest["world_size"] == kwargs.get("processes", 1)
    return Run(folder, code, output)


STRATEGIES = {  # by launch config, as a manifest names them; {1}: half of the processes
    "ddp": "DDP x {0}",
    "fsdp2": "FSDP2 x {0}",
    "fsdp2_offload": "FSDP2 x {0}",
    "hsdp": "HSDP 2 x {1}",
    "tensor_parallel": "TP {0}",
    "fsdp2_tensor_parallel": "FSDP2 {1} x TP 2",
    "sequence_parallel": "DDP x {0} with SP 2",
    "fsdp2_sequence_parallel": "FSDP2 {0} with SP 2",
    "deepspeed_zero2": "ZeRO-2 x {0}",
    "deepspeed_zero3": "ZeRO-3 x {0}",
    "deepspeed_zero3_offload": "ZeRO-3 x {0}",
}


def strategy(template: str, processes: int = 1, config: str | None = None, precision: str = "no") -> str:
    """How the manifest of such a run begins to say what it was launched as, or nothing if that is told elsewhere."""
    if template == "pretrain_pipeline" or config not in (None, *STRATEGIES):
        return ""
    name = STRATEGIES[config or "ddp"].format(processes, processes // 2) if config or processes > 1 else "1 process"
    return f"{name} on cpu, {'fp32' if precision == 'no' else precision}"


def with_fault(template: str, folder: Path, fault: str, *args: object, **kwargs) -> Run:
    """`run` with a fault on purpose (fault_actions.py), which may end it."""
    return run(template, folder, *args, env={"TEMPLATES_FAULT": fault}, check=False, **kwargs)


def continued(template: str, folder: Path, fault: str, *args: object, **kwargs) -> Run:
    """What the same command gives after a fault has ended the run."""
    assert with_fault(template, folder, fault, *args, **kwargs).returncode and not (folder / "final").exists()
    again = run(template, folder, *args, **kwargs)
    assert "resumed from" in again.output
    return again


def compare_families(what: str, config: str, folder: Path, families: Sequence[str]) -> list[dict[str, str]]:
    """What each of two ranks saw of each family, by compare_families.py under a launch config."""
    argv = ["--config_file", ROOT / f"accelerate_configs/{config}.yaml", "--mixed_precision", "no"]
    argv += ["--main_process_port", free_port(), ROOT / "tests/compare_families.py", what, folder, *families]
    code, output = LAUNCHER.run([*map(str, argv)], dict(os.environ), timeout=1800)
    assert code == 0, output
    seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert all([*of_rank] == [*families] for of_rank in seen)
    return seen


@pytest.fixture
def fault(monkeypatch):
    """A function that puts a fault into the next run in this process."""

    def plan(where: str) -> None:
        monkeypatch.setattr("tests.fault_actions._seen", Counter())
        monkeypatch.setenv("TEMPLATES_FAULT", where)

    return plan


_imports: dict[bytes, tuple[tuple[str, bool], ...]] = {}


def imports_of(path: Path) -> tuple[tuple[str, bool], ...]:
    """`imports` of tools/new.py, which parses each content of a file once."""
    content = path.read_bytes()
    if content not in _imports:
        _imports[content] = tuple(imports(path))
    return _imports[content]


def load_template(name: str):
    """Import a template as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "templates" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def run_here(template: str, *args: object) -> None:
    """Run a template in this process, for what does not depend on how it is launched; exits are exceptions."""
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from transformers import GenerationMixin

    from shared.config import parse as configs
    from shared.run import exits
    from shared.run.folder import _locks

    module = load_template(template)
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()
    for file in _locks.values():
        file.close()
    _locks.clear()
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        spared = mock.patch("matplotlib.figure.Figure.savefig", blank)
        fewer = mock.patch.object(GenerationMixin, "generate", fewer_tokens(GenerationMixin.generate))
        with contextlib.suppress(exits.Finished), spared, fewer:
            module.main(configs.parse(module.Config, [str(a) for a in ("--report_to", "none", "--logging_steps", 1, *args)]))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if "wandb" in sys.modules:
            with contextlib.suppress(Exception):  # it is broken already, or gone
                sys.modules["wandb"].teardown()  # one service a process: the next run here must not find a broken one


def learn_here(template: str, folder: Path, *args: object) -> Run:
    """As `run`, but in this process."""
    run_here(template, *args, "--output_dir", folder)
    return Run(folder, 0, "")


def refusal(template: str, *args: object) -> str:
    """The one line with which a template refuses these arguments."""
    from shared.process.errors import ConfigError

    with pytest.raises(ConfigError) as caught:
        run_here(template, *args)
    assert "\n" not in str(caught.value)
    return str(caught.value)
