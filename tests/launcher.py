"""`accelerate launch`, with the imports already done.

Importing torch and transformers takes most of a small run's time, in the launcher and in every process that it starts.
This program imports them once and forks for each run. What runs is Accelerate's own launcher and torchrun's own agent
with the arguments and the environment that they would have; only the start of a new interpreter is replaced, by a fork
that runs the script as `__main__`. Tests of start-up itself and of kills start the real thing.

Pictures are made and not painted, which would take half of a small run's time, unless TESTS_PAINT is in the environment.
"""

import array
import atexit
import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

PRELOADED = (
    *("torch", "torch.distributed.checkpoint", "torch.distributed.elastic.agent.server.api", "torch.distributed.run"),
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo", "torch.utils.flop_counter"),
    *("accelerate", "accelerate.commands.launch", "accelerate.utils.fsdp_utils", "peft", "peft.tuners.lora.bnb"),
    *("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "transformers.integrations"),
    *("transformers.models.auto.tokenization_auto", "transformers.modeling_utils", "transformers.loss.loss_utils"),
    *("transformers.models.convnext.modeling_convnext", "transformers.models.resnet.modeling_resnet"),
    *("torchvision.transforms.v2", "matplotlib.pyplot", "tyro", "tokenizers", "bitsandbytes", "tqdm", "pyarrow"),
    *("PIL.Image", "sklearn.metrics", "safetensors.torch"),
    "deepspeed",  # which unwrap_model imports where it is installed
)

POPEN = subprocess.Popen


class Forked:
    """The part of `subprocess.Popen` that the launchers use, for a Python script run in a fork of this process."""

    def __init__(self, args, env=None, start_new_session=False, **_unused):
        self.args, self.returncode = args, None
        self.pid = os.fork()
        if self.pid == 0:
            if start_new_session:
                os.setsid()
            run_as_main([str(a) for a in args[script_in(args) :]], dict(env))

    def poll(self):
        return self._reap(os.WNOHANG)

    def wait(self, timeout=None):
        end = time.monotonic() + (timeout if timeout is not None else 1e9)
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.02)
        return self.returncode

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def _reap(self, options):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)


def script_in(args):
    return next((i for i, a in enumerate(args[:4]) if str(a).endswith(".py")), 0)


def popen(args, *others, **options):
    """Processes that run a script are forked; anything else that a library starts is started."""
    return Forked(args, **options) if script_in(args) else POPEN(args, *others, **options)


def save_unpainted(_figure, file, **_options):
    """In place of matplotlib's `Figure.savefig`."""
    file.write(b"a picture") if hasattr(file, "write") else Path(file).write_bytes(b"a picture")


def run_as_main(argv, env):
    """Become a process that an interpreter with these arguments and this environment would be, and end."""
    os.environ.clear()
    os.environ.update(env)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL if number != signal.SIGINT else signal.default_int_handler)
    subprocess.Popen = POPEN
    if "TESTS_PAINT" not in env:
        sys.modules["matplotlib.figure"].Figure.savefig = save_unpainted
    sys.argv = argv
    sys.path[:1] = [str(Path(argv[0]).parent), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    code = 0
    try:
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    end(code)


def end(code):
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def launch(argv, env, cwd):
    """`accelerate launch ARGV`, in this process."""
    import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as torchrun
    from accelerate.commands.launch import launch_command, launch_command_parser

    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    subprocess.Popen = torchrun.Popen = popen
    code = 0
    try:
        launch_command(launch_command_parser().parse_args(argv))
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
        code = 1
    end(code)


def serve(path):
    """Answer each connection: a JSON line {argv, env, cwd} and the descriptor for its output; then pid and exit code."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        message, extra, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(4))
        if not message:
            return
        (output,) = array.array("i", extra[0][2])
        if os.fork():  # a process for each run, which reaps it, so that this one only waits for requests
            os.close(output)
            connection.close()
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            continue
        request = json.loads(message)
        child = os.fork()
        if child == 0:
            os.setsid()
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            server.close()
            connection.close()
            launch(**request)
        os.close(output)
        connection.sendall(f"{child}\n".encode())
        _, status = os.waitpid(child, 0)
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)


if __name__ == "__main__":
    for name in (*PRELOADED, *sys.argv[2:]):
        with contextlib.suppress(ImportError):
            __import__(name)
    serve(sys.argv[1])
