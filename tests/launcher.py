"""Python, and `accelerate launch`, with the imports already done.

Importing torch and transformers takes most of a small run's time, in the launcher and in every process that it starts.
This program imports them once and forks for each run, and again for each Python that the run starts. What runs is
Accelerate's own launcher and torchrun's own agent with the arguments and the environment that they would have; only the
start of a new interpreter is replaced, by a fork that runs the script, module or code as `__main__`. Tests of start-up
itself and of kills start the real thing.
"""

import array
import atexit
import contextlib
import gc
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
import types
import weakref
from importlib.machinery import SourceFileLoader
from pathlib import Path

PRELOADED = (
    *("torch", "torch.distributed.checkpoint", "torch.distributed.elastic.agent.server.api", "torch.distributed.run"),
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo", "torch.utils.flop_counter"),
    *("accelerate", "accelerate.commands.launch", "accelerate.utils.fsdp_utils", "peft", "peft.tuners.lora.bnb"),
    *("transformers.models.auto.modeling_auto", "transformers.models.llama.modeling_llama", "transformers.integrations"),
    *("transformers.models.auto.tokenization_auto", "transformers.modeling_utils", "transformers.loss.loss_utils"),
    *("transformers.models.convnext.modeling_convnext", "transformers.models.resnet.modeling_resnet"),
    *("torchvision.transforms.v2", "matplotlib.pyplot", "tyro", "tokenizers", "bitsandbytes", "tqdm", "pyarrow"),
    *("PIL.Image", "sklearn.metrics", "safetensors.torch", "xxhash", "encodings.idna", "multiprocessing.sharedctypes"),
    *("PIL.BmpImagePlugin", "PIL.GifImagePlugin", "PIL.JpegImagePlugin", "PIL.PpmImagePlugin", "encodings.utf_8_sig"),
    *("matplotlib.backends.backend_agg", "torch.distributed.elastic.rendezvous.static_tcp_rendezvous"),
    "deepspeed",  # which unwrap_model imports where it is installed
)
OURS = {"shared", "tools"}  # packages that a fork imports anew: it may have another folder's
PATH, POPEN, THREADS = tuple(sys.path[1:]), subprocess.Popen, 1
COMPILED = {}


class Popen(subprocess.Popen):
    """`subprocess.Popen`, but what this Python would run is run by a fork of this process."""

    def _execute_child(self, *arguments):
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments
        words = words_of_python(given["args"])
        if not words or given["shell"]:
            return super()._execute_child(*arguments)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.pid = os.fork()
        if self.pid == 0:
            end(self._become, given, words)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(given[name] for name in pipes))

    def _become(self, given, words):
        for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
            if given[name] >= 0:
                os.dup2(given[name], number)
        for name in ("p2cwrite", "c2pread", "errread"):
            if given[name] >= 0:
                os.close(given[name])
        if given["start_new_session"]:
            os.setsid()
        if given["preexec_fn"]:
            given["preexec_fn"]()
        run_as_main(words, given["env"], given["cwd"])


def words_of_python(args):
    """The arguments of Python in a command that starts it, or nothing."""
    program, *rest = [args] if isinstance(args, str) else map(str, args)
    if Path(program).name == "accelerate" and rest[:1] == ["launch"]:
        return ["-m", "accelerate.commands.launch", *rest[1:]]
    words = rest[rest[:1] == ["-u"] :]
    is_python = program == sys.executable or Path(program).name in ("python", "python3")
    return words if is_python and words and (words[0] in ("-m", "-c") or words[0].endswith(".py")) else []


def blank(_figure, file, **_options):
    """In place of Figure.savefig. Drawing takes a quarter of a second, as much as all else of many a small run."""
    from PIL import Image

    Image.new("L", (1, 1)).save(file, "png")


def fewer_tokens(generate):
    """In place of GenerationMixin.generate: 8 tokens of the 48 that pretrain.py writes after each evaluation."""

    def generate_fewer(*arguments, **options):
        if getattr(options.get("generation_config"), "max_new_tokens", None) == 48:
            options["generation_config"].max_new_tokens = 8
        return generate(*arguments, **options)

    return generate_fewer


def compile_once(load):
    """In place of SourceFileLoader.source_to_code: by path and content, what this process has compiled for its forks."""

    def source_to_code(loader, data, path, **options):
        return COMPILED.get((path, bytes(data))) or load(loader, data, path, **options)

    return source_to_code


def run_as_main(words, env=None, cwd=None):
    """Do what a new interpreter with these arguments and this environment would do."""
    import matplotlib.figure
    import torch
    from transformers import GenerationMixin

    os.chdir(cwd or os.getcwd())
    if env is not None:
        os.environ.clear()
        os.environ.update(env)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    weakref.finalize._registry.clear()  # the other process removes its temporary folders
    for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
        del sys.modules[name]

    kind = words[0] if words[0] in ("-m", "-c") else ""
    # Threads do not survive a fork: a process that may fork again has none.
    subprocess.Popen = Popen if kind else POPEN
    if torch.get_num_threads() != (threads := 1 if kind else THREADS):
        torch.set_num_threads(threads)
    if "TESTS_SPARE" in os.environ:
        matplotlib.figure.Figure.savefig = blank
        GenerationMixin.generate = fewer_tokens(GenerationMixin.generate)
    sys.argv = words[1:] if kind else words
    script_folder = str(Path(words[0]).resolve().parent)
    folder = {"-m": os.getcwd(), "-c": ""}.get(kind, script_folder)
    sys.path[:] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *PATH]
    if kind == "-m":
        sys.modules.pop(words[1], None)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv[0] = "-c"
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(words[0], run_name="__main__")


def end(work, *arguments):
    """Do the work of this process, and end it as an interpreter ends."""
    code = 0
    try:
        work(*arguments)
    except SystemExit as error:
        if not isinstance(error.code, int | None):
            print(error.code, file=sys.stderr)
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve(path):
    """Answer each connection, a JSON line {words, env, cwd, cores} and descriptors for output: pid, then exit code."""
    import torch
    import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler as torchrun

    global THREADS
    THREADS, torchrun.Popen = torch.get_num_threads(), Popen
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # also where the tests run under nohup
    gc.freeze()  # so that no collection of a fork looks through all that was imported, and copies it
    print("ready", flush=True)
    while True:
        connection, _ = server.accept()
        message, extra, _, _ = connection.recvmsg(1 << 20, socket.CMSG_SPACE(8))
        if not message:
            return
        outputs = array.array("i", extra[0][2])
        if os.fork():  # a process for each run, which reaps it, so that this one only waits for requests
            for output in outputs:
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
            for number, output in enumerate(outputs, 1):
                os.dup2(output, number)
                os.close(output)
            server.close()
            connection.close()
            os.sched_setaffinity(0, request.pop("cores"))
            end(run_as_main, *request.values())
        for output in outputs:
            os.close(output)
        connection.sendall(child.to_bytes(4))
        _, status = os.waitpid(child, 0)
        connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, signed=True))
        os._exit(0)


if __name__ == "__main__":
    gc.disable()
    for name in (*PRELOADED, *sys.argv[2:]):
        with contextlib.suppress(ImportError):
            __import__(name)
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("llama")  # compiles what all saves use
    if sys.dont_write_bytecode:
        sources = [path for folder in OURS for path in (Path(__file__).resolve().parents[1] / folder).rglob("*.py")]
        COMPILED |= {(str(path), path.read_bytes()): compile(path.read_bytes(), path, "exec") for path in sources}
        SourceFileLoader.source_to_code = compile_once(SourceFileLoader.source_to_code)
    gc.enable()
    serve(sys.argv[1])
