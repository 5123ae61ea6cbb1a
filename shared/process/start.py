"""What a script does before it imports torch: streams, signals and the environment."""

import contextlib
import os
import shlex
from pathlib import Path

from shared.process.errors import ConfigError
from shared.process.files import cache_dir
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


def require_shared_beside(script: Path) -> None:
    """Refuse another checkout's `shared/`, which an editable install puts before the one beside the
    script.
    """
    used = Path(__file__).resolve().parents[2]
    for root in script.resolve().parents[:2]:
        if root == used:
            return
        if (root / "shared/config/parse.py").is_file():
            raise ConfigError(
                f"{script} would run with {used}/shared: put "
                f"PYTHONPATH={shlex.quote(str(root))} before the command"
            )


def keep_compiled() -> None:
    """Keep the cache of torch.compile after the job. By default it is in /tmp, and clusters empty
    /tmp.
    """
    with contextlib.suppress(OSError):  # where HOME is read-only, torch takes /tmp
        # `accelerate launch` has imported torch, which sets that default.
        compiled = cache_dir() / "inductor"
        compiled.mkdir(parents=True, exist_ok=True)
        if "/torchinductor_" in os.environ.get("TORCHINDUCTOR_CACHE_DIR", "/torchinductor_"):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
