"""Jobs: what a cluster starts is started here, with stand-ins for the cluster only."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml
from kubernetes_validate.utils import all_versions, major_minor, validate
from packaging.version import Version

from shared.commands import run as command
from shared.commands.verify_resume import compare
from shared.process.signals import start_of
from tests.conftest import LAUNCHER, ROOT, Run, Started, exit_of, free_port, processes_on, python, run, slow

STEPS = 8
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
SHELL = sorted(str(p.relative_to(ROOT)) for p in [*ROOT.glob("jobs/**/*.sh"), ROOT / ".ci/run", ROOT / ".ci/package"])


@pytest.fixture(scope="module")
def flags(text_file, tiny_model):
    return [
        *("--train_file", str(text_file), "--model_name_or_path", str(tiny_model), "--seq_length", "32"),
        *("--max_steps", str(STEPS), "--save_steps", "2", "--eval_samples", "4", "--global_batch_size", "8"),
        *("--per_device_train_batch_size", "2", "--report_to", "none", "--logging_steps", "1", "--audit_data"),
    ]


@pytest.fixture(scope="module")
def straight(flags, tmp_path_factory):
    """The same on two processes, left alone."""
    return run("pretrain", tmp_path_factory.mktemp("straight") / "run", *flags, processes=2)


def wait_for_step(folder: Path, step: int, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 180
    while f'"step": {step},' not in (folder / "metrics.jsonl").read_text() if (folder / "metrics.jsonl").exists() else True:
        assert time.monotonic() < deadline and process.poll() is None, log.read_text()
        time.sleep(0.02)


# Written well --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ["shellcheck", *SHELL],
        ["hadolint", "Dockerfile"],
        ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", "jobs/compose.yaml"],
    ],
)
def test_their_checkers_find_nothing(command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={"PATH": PATH})
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_version_of_kubernetes_in_use_takes_them():
    """All versions from 1.30 on that kubernetes-validate has schemas of."""
    versions = {v for v in map(major_minor, all_versions()) if Version(v) >= Version("1.30")}
    assert versions >= {f"1.{minor}" for minor in range(30, 38)}
    for name, kinds in (("kubernetes", 2), ("kubernetes_multi_node", 4)):
        documents = list(yaml.safe_load_all((ROOT / f"jobs/{name}.yaml").read_text()))
        assert len(documents) == kinds
        for document in documents:
            assert {validate(document, version, strict=True) for version in versions} == versions


# run: the container's entry point ------------------------------------------------------------------------------------


RUN = ("-m", "shared", "run")


def under_run(log: Path, *command: object) -> Started:
    """Launcher and training are forks, too. On clusters (below) they are not."""
    with log.open("a") as output:
        return LAUNCHER.start([*RUN, *command], output, output)


RECORDED = """echo '{"exit_code": %s, "alone": %s}' > "$TEMPLATES_RUN/exit.json\""""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("true",), 0),
        (("sh", "-c", "exit 7"), 7),
        (("no-such-command",), 2),
        (("sh", "-c", "kill -TERM $$; kill -USR1 $$; exit 5"), 5),  # ignored
        (("sh", "-c", "kill -KILL $$"), 137),
        (("sh", "-c", f"{RECORDED % (4, 'false')}; exit 1"), 4),
        (("sh", "-c", RECORDED % (4, "false")), 0),  # a part of it failed, which it has coped with
        (("sh", "-c", f"{RECORDED % (143, 'true')}; exit 1"), 1),  # stopped, but not by a signal to us
    ],
)
def test_the_exit_code_of_a_command(tmp_path, command, code):
    assert under_run(tmp_path / "log", *command).wait(timeout=60) == code


def test_a_process_that_has_got_an_ended_one_s_id_gets_no_signal(tmp_path):
    with subprocess.Popen(["sleep", "60"]) as bystander:
        note = tmp_path / str(bystander.pid)
        note.write_text(start_of(os.getpid()))  # of an earlier process with its id
        assert start_of(os.getpid()) and command._training(str(tmp_path)) == set()
        note.write_text(start_of(bystander.pid))
        assert command._training(str(tmp_path)) == {bystander.pid}
        bystander.kill()


def test_wrong_input_has_its_exit_code_and_no_traceback(flags, tmp_path):
    wrong = ["templates/pretrain.py", *flags, "--output_dir", tmp_path / "run", "--validation_file", "/nowhere"]
    for config in ("ddp", "cpu"):  # torch's launcher, and Accelerate's own
        launch = ["--config_file", f"accelerate_configs/{config}.yaml", "--main_process_port", free_port()]
        log = tmp_path / config
        assert under_run(log, "accelerate", "launch", *launch, *wrong).wait(timeout=200) == 2
        said = log.read_text()
        assert "error: " in said and "/nowhere" in said and "Traceback" not in said


@pytest.mark.slow
def test_a_stop_before_training_begins_has_its_exit_code(flags, tmp_path):
    """At once, whether there is a training process already or not."""
    launch = [*RUN, "accelerate", "launch", "templates/pretrain.py", "--output_dir", str(tmp_path / "run"), *flags]
    for delay, number in ((2, signal.SIGTERM), (6, signal.SIGUSR1)):
        process = subprocess.Popen([sys.executable, *launch], cwd=ROOT, env=os.environ | {"PATH": PATH})
        time.sleep(delay)
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number
        assert not any(str(tmp_path / "run") in (p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"]))


BROKEN = """
import os, time
from dataclasses import dataclass
from shared.config.parse import parse_or_exit

@dataclass(frozen=True)
class Config:
    x: int = 1

parse_or_exit(Config)
if os.environ["RANK"] == "1":
    {fault}
time.sleep(60)
"""


@pytest.mark.parametrize("fault", ["raise KeyError(1)", pytest.param("os.kill(os.getpid(), 9)", marks=pytest.mark.slow)])
def test_a_process_that_fails_before_training_is_no_stop(tmp_path, fault):
    """torch's launcher then ends the others with SIGTERM, which nobody had asked for."""
    (tmp_path / "broken.py").write_text(BROKEN.format(fault=fault))
    launch = ["--config_file", "accelerate_configs/ddp.yaml", "--mixed_precision", "no", "--main_process_port", free_port()]
    assert under_run(tmp_path / "log", "accelerate", "launch", *launch, tmp_path / "broken.py").wait(timeout=200) == 1


@pytest.mark.parametrize(
    ("processes", "number", "restarts"),
    [
        (1, signal.SIGTERM, 0),
        (2, signal.SIGTERM, 0),
        (2, signal.SIGHUP, 0),
        (2, signal.SIGTERM, 1),
    ],
)
@pytest.mark.slow
def test_a_stop_writes_a_checkpoint_and_ends_with_its_code(flags, straight, tmp_path, processes, number, restarts):
    """SIGTERM to the first process, as when the container is stopped; or a signal to all of its group, as by Ctrl-C.

    When it ends, so has training, though a launcher that dies of SIGHUP does not wait for it. With --max_restarts torch's
    launcher takes the stop for a failure: what it starts anew is stopped, too.
    """
    launch = ["--config_file", "accelerate_configs/ddp.yaml"] if processes > 1 else []
    launch += ["--mixed_precision", "no", "--num_processes", processes, "--main_process_port", free_port()]
    launch += ["--max_restarts", restarts] if restarts else []
    argv = [*launch, "templates/pretrain.py", *flags, "--output_dir", tmp_path / "run"]
    log = tmp_path / "log"
    process = under_run(log, "accelerate", "launch", *argv)
    wait_for_step(tmp_path / "run", 3, process, log)
    alone = (processes, number) == (2, signal.SIGTERM)
    process.send_signal(number) if alone else os.killpg(process.pid, number)
    assert process.wait(timeout=100) == 128 + number, log.read_text()
    assert log.read_text().count("stopped by") == 1 + restarts
    assert ("stopped by SIGTERM before the start" in log.read_text()) == bool(restarts)
    assert number == signal.SIGHUP or "SignalException" not in log.read_text()
    assert exit_of(tmp_path / "run")["exit_code"] == 143 and not (tmp_path / "run/final").exists()
    code, output = LAUNCHER.run([str(a) for a in argv], dict(os.environ), cwd=ROOT)
    assert code == 0, output
    if processes == 2:
        assert set(compare(straight.folder, tmp_path / "run").values()) == {""}


@pytest.mark.parametrize("launcher", ["accelerate", slow("torchrun")])
def test_a_dead_rank_restarts_all_from_the_newest_checkpoint(flags, straight, tmp_path, launcher):
    """Rank 1 is killed in each life, as long as that has so many micro-batches. Wrong input is tried as often as allowed."""
    script = ["templates/pretrain.py", *flags, "--output_dir", tmp_path / "run"]
    if launcher == "accelerate":
        words = ["-m", "accelerate.commands.launch", "--config_file", "accelerate_configs/ddp.yaml", "--max_restarts", 3]
        words += ["--mixed_precision", "no", "--num_processes", 2, "--main_process_port", free_port()]
    else:  # of one node, where up to four may join
        words = ["-m", "torch.distributed.run", "--nnodes", "1:4", "--nproc-per-node", 2, "--max-restarts", 3]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "a"]
        words += ["--rdzv-conf", "last_call_timeout=1"]
    env = os.environ | {"TEMPLATES_FAULT": "micro_batch:kill@7#1", "PYTHONPATH": str(ROOT)}
    done = python(*words, *script, env=env)
    assert done.returncode == 0, done.stderr
    resumed = [int(step) for step in re.findall(r"resumed from .* at step (\d+)", done.stderr)]
    assert len(resumed) == 3 and sorted(resumed) == resumed, done.stderr
    assert set(compare(straight.folder, tmp_path / "run").values()) == {""}
    if launcher == "accelerate":
        words[words.index("--max_restarts") + 1] = 1
        refused = python(*words, *script, "--output_dir", tmp_path / "refused", "--global_batch_size", 7)
        assert refused.returncode and refused.stderr.count("is not a multiple of the 2 processes") == 2, refused.stderr


# SLURM -------------------------------------------------------------------------------------------------------------------

# One process a node, each in the network namespace that stands for it; a signal goes to all processes of the step.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys

start = next(i for i, word in enumerate(sys.argv) if word in ("sh", "apptainer"))
options, command, nodes = sys.argv[1:start], sys.argv[start:], os.environ["STANDS_FOR_NODES"].split()
print("srun", *options, flush=True)
tasks = []

def forward(number, _frame):
    for task in tasks:  # to what srun has started, as SLURM does where cgroups track a job: not to its children
        task.send_signal(number)

for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, forward)
for number, node in enumerate(nodes):
    inside = ["ip", "netns", "exec", node] if node != "here" else []
    tasks.append(subprocess.Popen([*inside, *command], env=os.environ | {{"SLURM_NODEID": str(number)}}))
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = """#!/bin/sh
case "$1" in
show) if [ "$2" = hostnames ]; then echo "$STANDS_FOR_ADDRESS"; else echo "$STANDS_FOR_JOB"; fi ;;
requeue) echo "$2" >> "$STANDS_FOR_QUEUE" ;;
esac
"""
APPTAINER = """#!/bin/sh
echo "apptainer $*"
while [ "${1%.sif}" = "$1" ]; do shift; done
shift
exec "$@"
"""


@pytest.fixture
def slurm(tmp_path):
    """The environment of a job of SLURM whose commands are stand-ins."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("apptainer", APPTAINER)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "1"}
    stand_in = {"STANDS_FOR_NODES": "here", "STANDS_FOR_ADDRESS": "127.0.0.1", "STANDS_FOR_QUEUE": str(tmp_path / "queue")}
    (tmp_path / "queue").touch()
    return os.environ | job | stand_in | {"PATH": f"{folder}:{PATH}", "MAIN_PORT": str(free_port())}


def sbatch(env, log: Path, *arguments, cwd=ROOT) -> subprocess.Popen:
    """What runs a batch script; the log is continued, as with --open-mode=append."""
    command = ["bash", str(ROOT / "jobs/slurm.sh"), *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, env=env, stdout=log.open("a"), stderr=subprocess.STDOUT)


def srun_of(process: subprocess.Popen) -> int:
    return next(p.pid for p in psutil.Process(process.pid).children() if "srun" in " ".join(p.cmdline()))


@pytest.mark.slow
def test_slurm_two_nodes_stop_when_the_time_is_over_and_are_queued_again(machines, slurm, flags, straight, tmp_path):
    node = {"SLURM_NNODES": "2", "STANDS_FOR_NODES": " ".join(machines), "STANDS_FOR_ADDRESS": "10.77.0.1"}
    env = slurm | node | {"RUN_DIR": str(tmp_path / "run"), "GLOO_SOCKET_IFNAME": "eth0", "ACCELERATE_MIXED_PRECISION": "no"}
    log, command = tmp_path / "train-77.log", ["--mixed_precision", "no", "templates/pretrain.py", *flags]
    job = sbatch(env, log, *command)
    wait_for_step(tmp_path / "run", 3, job, log)
    os.kill(srun_of(job), signal.SIGUSR1)  # --signal=USR1@300
    assert job.wait(timeout=120) == 138, log.read_text()
    assert (tmp_path / "queue").read_text() == "77\n"
    assert "time limit: queued again, continues from checkpoint-" in log.read_text()
    assert exit_of(tmp_path / "run")["cause"].startswith("stopped by SIGUSR1 at step ")
    assert not any(processes_on(machine) for machine in machines)

    job = sbatch(env, log, *command)  # which SLURM does now
    assert job.wait(timeout=200) == 0, log.read_text()
    assert "resumed from" in log.read_text() and (tmp_path / "queue").read_text() == "77\n"
    assert set(compare(straight.folder, tmp_path / "run").values()) == {""}
    manifest = json.loads((tmp_path / "run" / f"checkpoint-{STEPS:06d}" / "MANIFEST.json").read_text())
    assert manifest["strategy"] == "DDP x 2 on cpu, fp32" and manifest["world_size"] == 2


@pytest.mark.slow
def test_slurm_cuts_weights_inside_nodes_and_learns_the_same(machines, slurm, flags, straight, tmp_path):
    node = {"SLURM_NNODES": "2", "STANDS_FOR_NODES": " ".join(machines), "STANDS_FOR_ADDRESS": "10.77.0.1"}
    env = slurm | node | {"RUN_DIR": str(tmp_path / "run"), "GLOO_SOCKET_IFNAME": "eth0"}
    env |= {"CONFIG": "multi_node_hsdp", "PROCESSES_PER_NODE": "2"}
    log = tmp_path / "log"
    job = sbatch(env, log, "--mixed_precision", "no", "templates/pretrain.py", *flags)
    assert job.wait(timeout=300) == 0, log.read_text()
    hsdp = Run(tmp_path / "run", 0, "")
    manifest = hsdp.manifest(STEPS)
    assert manifest["strategy"] == "HSDP 2 x 2 on cpu, fp32" and manifest["world_size"] == 4
    assert hsdp.losses == pytest.approx(straight.losses, rel=1e-5)


@pytest.mark.slow
def test_slurm_does_not_queue_again_what_was_cancelled(slurm, flags, tmp_path):
    log, env = tmp_path / "log", slurm | {"RUN_DIR": str(tmp_path / "run")}
    job = sbatch(env, log, "--mixed_precision", "no", "templates/pretrain.py", *flags)
    wait_for_step(tmp_path / "run", 3, job, log)
    for process in (job.pid, srun_of(job)):
        os.kill(process, signal.SIGTERM)
    assert job.wait(timeout=100) == 143, log.read_text()
    assert (tmp_path / "queue").read_text() == "" and exit_of(tmp_path / "run")["exit_code"] == 143


@pytest.mark.parametrize(
    ("told", "ended", "code", "tried"),
    [
        ('{"exit_code": 2, "cause": "x"}', 3, 2, False),
        ('{"exit_code": 143, "cause": "stopped by SIGUSR1 at step 3"}', 3, 138, False),
        ('{"exit_code": ', 3, 3, False),  # on a full disk
        ('{"exit_code": 143, "cause": "stopped by SIGTERM at step 3"}', 3, 143, False),
        ('{"exit_code": 1, "cause": "RuntimeError: CUDA error"}', 137, 1, True),
        ('{"exit_code": 5, "cause": "rank 0 at step 3: rank 1 does not answer"}', 137, 5, True),
        (None, 2, 2, False),  # a flag or a file that is wrong, before the run has a folder to say so in
        (None, 137, 137, True),
    ],
)
def test_slurm_ends_with_the_code_of_the_training_or_else_of_the_step(slurm, tmp_path, told, ended, code, tried):
    folder, log = tmp_path / "run", tmp_path / "log"
    for name in ("checkpoint-999999", "checkpoint-best"):
        (folder / name).mkdir(parents=True)
    write = f"printf %s '{told}' > '{folder}/exit.json'; " if told is not None else ""
    (tmp_path / "bin" / "srun").write_text(f"#!/bin/sh\n{write}exit {ended}\n")
    running = "JobState=RUNNING PreemptTime=None"
    left = 3  # times without a new checkpoint
    for state, again in (
        (running, code == 138 or tried),
        ("JobState=CANCELLED PreemptTime=2026-01-01T00:00:00", code == 138),
        # within the partition's GraceTime
        ("JobState=RUNNING PreemptTime=2026-01-01T00:00:00", code in (138, 143) or tried),
        (running, code == 138 or tried),
        (running, code == 138 or tried),
        ("checkpoint-1000000", code == 138 or tried),
    ):
        if state.startswith("checkpoint"):
            (folder / state).mkdir()
            state, left = running, 3
        (tmp_path / "queue").write_text("")
        job = sbatch(slurm | {"RUN_DIR": str(folder), "STANDS_FOR_JOB": state}, log, "templates/pretrain.py")
        assert job.wait(timeout=60) == code, log.read_text()
        assert "expected" not in log.read_text() and ((tmp_path / "queue").read_text() == "77\n") == (again and left > 0)
        left -= again
    assert sbatch(slurm, log, "templates/pretrain.py", "--output_dir", "x").wait(timeout=60) == 2
    assert log.read_text().endswith("use RUN_DIR=... instead of --output_dir\n")


# In one write: where Python does not buffer, print writes word by word, and two processes into each other's lines.
HELLO = """import os, sys
world, caches = os.environ["WORLD_SIZE"], os.environ["TEMPLATES_CACHE"]
sys.stdout.write(f"hello from {world} {sys.argv[1:]}\\ncaches in {caches}\\n")
"""


@pytest.mark.parametrize("image", ["templates.sif", slow("registry#templates")])
def test_slurm_in_a_container(slurm, tmp_path, image):
    """Which of the two runtimes is asked, and that what it starts is the same."""
    shutil.copytree(ROOT / "shared", tmp_path / "shared")
    shutil.copytree(ROOT / "accelerate_configs", tmp_path / "accelerate_configs")
    (tmp_path / "hello.py").write_text(HELLO)
    log = tmp_path / "log"
    env = {name: value for name, value in slurm.items() if name not in ("TEMPLATES_CACHE", "HF_HOME")}
    env |= {"IMAGE": image, "PROCESSES_PER_NODE": "2", "MOUNTS": "/data", "PYTHONPATH": str(ROOT)}
    assert sbatch(env, log, "hello.py", "--x", 1, cwd=tmp_path).wait(timeout=120) == 0, log.read_text()
    said = log.read_text()
    assert said.count("hello from 2 ['--x', '1', '--output_dir', 'runs/train-77']") == 2
    pyxis = f"--container-image={image} --container-mounts={tmp_path}:{tmp_path},/data:/data --container-workdir={tmp_path} "
    assert (pyxis in said) == (not image.endswith(".sif"))
    apptainer = f"apptainer exec --nv --bind {tmp_path},/data,{tmp_path}/cache:/cache --pwd {tmp_path} templates.sif sh -c"
    assert (apptainer in said) == image.endswith(".sif")
    assert said.count(f"caches in {tmp_path}/cache/templates") == 2


# Kubernetes and Compose ------------------------------------------------------------------------------------------------


def arguments_of(name: str) -> list[str]:
    """What the container of a manifest is started with."""
    (job,) = (d for d in yaml.safe_load_all((ROOT / f"jobs/{name}.yaml").read_text()) if d["kind"] == "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert "command" not in container  # the image's entry point
    return container["args"]


def on_this_machine(arguments: list[str], **values: object) -> list[str]:
    """Two CPU processes in place of GPUs, and the values that the cluster fills in."""
    text = "\n".join(arguments)
    for old, new in values.items():
        assert old in text, old
        text = text.replace(old, str(new))
    first = text.splitlines()
    return [*first[:2], "--mixed_precision=no", *first[2:]]


@pytest.mark.slow
def test_the_command_of_the_kubernetes_job(tmp_path, chat_file, tiny_model):
    given = on_this_machine(arguments_of("kubernetes"), **{"=8": "=2", "outputs/train": tmp_path / "run"})
    given += ["--model_name_or_path", tiny_model, "--train_file", chat_file, "--max_steps", 2, "--report_to", "none"]
    given += ["--seq_length", 64, "--show_answers", 0, "--global_batch_size", 4, "--per_device_train_batch_size", 2]
    given.insert(2, f"--main_process_port={free_port()}")
    log = tmp_path / "log"
    assert under_run(log, *given).wait(timeout=200) == 0, log.read_text()
    manifest = json.loads((tmp_path / "run/checkpoint-000002/MANIFEST.json").read_text())
    assert manifest["strategy"] == "DDP x 2 on cpu, fp32"


@pytest.mark.slow
def test_the_kubernetes_job_on_two_nodes_continues_after_one_was_killed(machines, flags, straight, tmp_path):
    """Pods find the first one by its name. When one is killed, the others end; all are started again."""
    hosts = [Path("/etc/netns") / machine / "hosts" for machine in machines]  # /etc/hosts inside
    log = tmp_path / "log"

    def start(number: int) -> subprocess.Popen:
        values = {"num_processes=16": "num_processes=2", "$(JOB_COMPLETION_INDEX)": number}
        given = on_this_machine(arguments_of("kubernetes_multi_node"), **values | {"outputs/train": tmp_path / "run"})
        command = ["ip", "netns", "exec", machines[number], sys.executable, "-m", "shared", "run", *given, *flags]
        env = os.environ | {"PATH": PATH, "GLOO_SOCKET_IFNAME": "eth0"}
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=log.open("a"), stderr=subprocess.STDOUT)

    try:
        for file in hosts:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("127.0.0.1 localhost\n10.77.0.1 train-nodes-0.train-nodes\n")
        pods = [start(0), start(1)]
        wait_for_step(tmp_path / "run", 5, pods[0], log)
        for pid in processes_on(machines[1]):
            os.kill(pid, signal.SIGKILL)
        assert all(pod.wait(timeout=120) for pod in pods) and not (tmp_path / "run/final").exists()
        assert [pod.wait(timeout=300) for pod in (start(0), start(1))] == [0, 0], log.read_text()
    finally:
        for file in hosts:
            shutil.rmtree(file.parent, ignore_errors=True)
    manifest = Run(tmp_path / "run", 0, "").manifest(STEPS)
    assert manifest["strategy"] == "DDP x 2 on cpu, fp32" and "resumed from" in log.read_text()
    assert set(compare(straight.folder, tmp_path / "run").values()) == {""}


def test_kubernetes_does_not_retry_what_would_fail_again():
    for name in ("kubernetes", "kubernetes_multi_node"):
        (job,) = (d for d in yaml.safe_load_all((ROOT / f"jobs/{name}.yaml").read_text()) if d["kind"] == "Job")
        rules = [rule for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
        assert {rule["action"]: rule["onExitCodes"]["values"] for rule in rules} == {"FailJob": [2, 3, 4], "Ignore": [143]}
        assert job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 300


def test_the_command_of_the_compose_file_is_that_of_the_kubernetes_job():
    (service,) = yaml.safe_load((ROOT / "jobs/compose.yaml").read_text())["services"].values()
    same = [a.replace("${GPUS:-1}", "8") for a in service["command"]]
    assert same == arguments_of("kubernetes")
    assert service["stop_grace_period"] == "5m"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "said", "flags"),
    [
        ("lora_finetune", "adapter in", "--max_steps 6 --save_steps 2 --eval_samples 4 --show_answers 0"),
        ("image_classification", "eval_accuracy", "--max_steps 60 --save_steps 4"),
    ],
)
def test_the_notebook_trains_is_interrupted_and_goes_on(tmp_path, chat_file, template, said, flags):
    """With its own cells in its own kernel, but what is installed; on a file of the user's, and as a demo."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "jobs/rented_gpu.ipynb", as_version=4)
    chosen, install = (
        next(cell for cell in notebook.cells if tag in cell.metadata.get("tags", ())) for tag in ("parameters", "setup")
    )
    own = template == "lora_finetune"
    chosen.source += f"\nTEMPLATE, FLAGS = {template!r}, '--report_to none {flags}'"
    chosen.source += f"\nOWN_DATA, DATA = True, {os.path.relpath(chat_file, tmp_path)!r}" * own
    chosen.source += "\nimport os, sys\nos.environ['PYTHONPATH'] = " + repr(str(ROOT))
    assert "training-templates new {TEMPLATE} {PROJECT}" in install.source
    install.source = "!{sys.executable} -m shared new {TEMPLATE} {PROJECT}\n%cd {PROJECT}\nos.environ.pop('PYTHONPATH')"
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    text = "".join(output.get("text", "") for output in outputs)
    assert "interrupted, with ['checkpoint-0000" in text and "resumed from" in text and said in text, text
    assert ("chats.jsonl" in text) == own and "model.safetensors" in text
    assert any("image/png" in output.get("data", ()) for output in outputs)
