"""Runs of the templates on CUDA devices made of host memory: see device.py."""

import json
import os
import platform
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT, Launcher, Run, free_port

HERE = Path(__file__).resolve().parent


@dataclass
class OnCuda(Run):
    """What a run left behind, and what happened on its devices."""

    logs: list[dict]  # by rank

    def counts(self, rank: int = 0) -> dict[str, int]:
        """Kernels and collectives, by name."""
        return self.logs[rank]["counts"]

    def at(self, step: int, rank: int = 0) -> dict[str, int]:
        """Copies and waits, by what and where, between the end of this optimizer step and that of the next."""
        return {what: number for when, what, number in self.logs[rank]["rows"] if when == step}


@pytest.fixture(scope="session")
def library(tmp_path_factory) -> Path:
    """The CUDA runtime of cudart.c, compiled with the headers that come with PyTorch."""
    import torch

    if not torch.version.cuda or platform.machine() != "x86_64" or not shutil.which("gcc"):
        pytest.skip("needs PyTorch for CUDA on x86-64, and gcc")
    packages = Path(sysconfig.get_paths()["purelib"])
    roots = {Path(torch.__file__).parents[1], packages}
    (header, *_) = [found for root in roots for found in root.glob("nvidia/*/include/cuda_runtime_api.h")]
    path = tmp_path_factory.mktemp("cudart") / "libcuda.so.1"
    include = ["-I", str(HERE), "-I", str(header.parent)]
    flags = ["-O1", "-w", "-shared", "-fPIC", f"-Wl,-soname,{path.name}"]  # the name that PyTorch looks for the driver under
    subprocess.run(["gcc", *flags, *include, "-o", str(path), str(HERE / "cudart.c")], check=True)
    return path


@pytest.fixture(scope="session")
def on_cuda(library, tmp_path_factory):
    """A function that launches a template on pretend devices, in fp32 unless it is told otherwise."""
    environment = {"LD_PRELOAD": str(library), "PRETEND_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    launcher = Launcher(environment | {"PYTHONPATH": str(HERE)}, ("device",))

    def launch(template, folder, *args, processes=1, config="single_gpu", precision="no", env=None, check=True) -> OnCuda:
        log = tmp_path_factory.mktemp("devices")
        argv = ["--config_file", ROOT / "accelerate_configs" / f"{config}.yaml", "--mixed_precision", precision]
        argv += ["--num_processes", processes, "--main_process_port", free_port()]
        argv += [HERE / "run.py", ROOT / "templates" / f"{template}.py", "--output_dir", folder, "--report_to", "none"]
        if isinstance(template, Path):
            argv[-5:] = [template]
        variables = os.environ | environment | {"PRETEND_LOG": str(log), "PYTHONPATH": str(ROOT)} | (env or {})
        del variables["ACCELERATE_USE_CPU"]
        code, output = launcher.run([str(arg) for arg in (*argv, *args)], variables, timeout=240)
        assert not check or code == 0, output
        logs = [json.loads(path.read_text()) for path in sorted(log.glob("rank*.json"))]
        return OnCuda(folder, code, output, logs)

    yield launch
    launcher.close()
