"""What a script does before it imports torch: streams, signals and the environment."""

import os

from shared.process.ranks import env_flag
from shared.process.signals import stop_on_signals_before_training
from shared.process.streams import outlive_readers


def begin() -> None:
    """Let signals end this process and lost readers not; hide the GPUs where the launch is for the
    CPU.
    """
    outlive_readers()
    stop_on_signals_before_training()
    if env_flag("ACCELERATE_USE_CPU"):  # otherwise parts of torch would use a GPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
