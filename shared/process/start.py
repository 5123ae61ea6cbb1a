"""What a script does before it imports torch: streams, signals and the environment."""

import os

from shared.process.ranks import env_flag
from shared.process.signals import stop_on_signals_before_training
from shared.process.streams import outlive_readers


def begin() -> None:
    """Let signals end this process and lost readers not; hide the GPUs where the launch is for the
    CPU; let threads sleep while they wait.
    """
    outlive_readers()
    sleep_between_parallel_regions()
    stop_on_signals_before_training()
    if env_flag("ACCELERATE_USE_CPU"):  # otherwise parts of torch would use a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def sleep_between_parallel_regions() -> None:
    """Let OpenMP's threads sleep if they wait for each other for more than some 0.2 ms.

    By default they spin for 10 ms and more. On cores that other processes use too, a thread then
    spins away the time in which the thread that it waits for could run. The user's own choice
    stays. libgomp reads the variable when it is loaded: call this before torch is imported.
    https://gcc.gnu.org/onlinedocs/libgomp/GOMP_005fSPINCOUNT.html
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
