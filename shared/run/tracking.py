"""W&B, or another tracker that Accelerate knows. metrics.jsonl does not depend on it."""

import contextlib
import os
import secrets
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.config import parse as configs
from shared.process.errors import ConfigError, first_line
from shared.process.printing import print_main
from shared.process.redaction import redact
from shared.run.prepared import Prepared
from shared.run.state import TrainState


def tracker_name(report_to: str) -> str | None:
    """The tracker for `launch.start`, None for none. Raises ConfigError for one that is unknown or
    not installed.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    if report_to == "none":
        return None
    if report_to not in {str(name) for name in get_available_trackers()}:
        problem = f"not one of none, {', '.join(LOGGER_TYPE_TO_CLASS)}"
        if report_to in LOGGER_TYPE_TO_CLASS:
            problem = f"not installed (pip install {report_to})"
        raise ConfigError(f"--report_to {report_to}: {problem}")
    return report_to


class Tracker:
    """A run as its tracker shows it. If the tracker fails, that is printed once, and the run goes
    on without it. Every rank may make one and call it; the main rank acts.

    Args:
        prepared: the run.
        state: W&B's run id is put into it.
    """

    def __init__(self, prepared: Prepared, state: TrainState) -> None:
        self.accelerator = prepared.accelerator
        self.run_dir = prepared.dir
        self.state = state
        config = prepared.config.log
        self.name = tracker_name(config.report_to) if prepared.is_main else None
        if self.name is None:
            return
        project = redact(config.project_name or prepared.name)
        settings = redact(configs.flatten(prepared.config))
        if self.name == "wandb":
            self._start_wandb(project, redact(config.run_name or prepared.dir.name), settings)
        else:
            self._start(project, settings)

    def _start(self, project: str, settings: dict[str, Any]) -> None:
        self.accelerator.project_configuration.logging_dir = str(self.run_dir)
        plain = {k: v if isinstance(v, int | float | str) else str(v) for k, v in settings.items()}
        # TensorBoard then does not show what a killed run wrote after its checkpoint
        purge = self.state.step + (self.state.step > 0)
        folder = shlex.quote(str(self.run_dir))
        if self.name == "tensorboard":
            print_main(f"TensorBoard: tensorboard --logdir {folder}")
        elif purge:
            print_main(f"{self.name}: what follows step {self.state.step} is logged as another run")
        if self.name == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
            # else it would be in the current folder
            os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{self.run_dir}/mlflow.db"
            print_main(f"MLflow: mlflow ui --backend-store-uri sqlite:///{folder}/mlflow.db")
        options = {
            "tensorboard": {"purge_step": purge},
            "mlflow": {"logging_dir": str(self.run_dir / "mlruns")},
        }
        self.accelerator.init_trackers(project, plain, options)

    def _start_wandb(self, project: str, name: str, settings: dict[str, Any]) -> None:
        import wandb

        is_logged_in = False
        with contextlib.suppress(Exception):  # no key, or none that W&B takes
            is_logged_in = wandb.login(prompt=False, verify=False)
        self.state.tracker_run_id = self.state.tracker_run_id or secrets.token_hex(4)
        options: dict[str, Any] = {
            "id": self.state.tracker_run_id,
            "name": name,
            "dir": str(self.run_dir),
            "resume": "allow",
            "mode": os.environ.get("WANDB_MODE") or ("online" if is_logged_in else "offline"),
            # Its metadata are the command line, where secrets may stand, and machine, user and
            # repository.
            "settings": wandb.Settings(
                quiet=True,
                silent=True,
                console="off",
                save_code=False,
                x_disable_meta=True,
                init_timeout=float(os.environ.get("WANDB_INIT_TIMEOUT", "30")),
            ),
        }
        try:
            self.accelerator.init_trackers(project, settings, {"wandb": options})
        except wandb.errors.Error as error:
            print_main(f"warning: W&B cannot be reached ({first_line(error)})")
            self.accelerator.trackers.clear()
            wandb.teardown()  # its service still holds the run's id
            options["mode"] = "offline"
            try:
                self.accelerator.init_trackers(project, settings, {"wandb": options})
            except wandb.errors.Error as refused:  # nor without a network: it is what was asked for
                raise ConfigError(f"W&B refuses this run ({first_line(refused)})") from None
        if options["mode"] == "offline":
            kept = shlex.quote(str(self.run_dir / "wandb"))
            print_main(
                "W&B: this run is logged offline; to upload it: wandb login && "
                f"wandb sync {kept}/offline-*"
            )
        run = self.accelerator.get_tracker("wandb", unwrap=True)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")

    @contextlib.contextmanager
    def _or_without(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if self.name:
                print_main(
                    f"warning: {self.name} failed, and the run goes on without it "
                    f"({first_line(error)})"
                )
            self.name = None
            self.accelerator.trackers.clear()

    def log(self, values: dict[str, Any]) -> None:
        """Show values of the present step."""
        # W&B gets the step as a value alone: by its own step, it drops what a resumed run repeats.
        step = None if self.name == "wandb" else self.state.step
        with self._or_without():
            self.accelerator.log({**values, "step": self.state.step}, step=step)

    def log_table(self, name: str, columns: list[str], rows: list[list[Any]]) -> None:
        """Show a table in W&B; other trackers have none."""
        if rows and self.name == "wandb":
            with self._or_without():
                tracker = self.accelerator.get_tracker(self.name)
                tracker.log_table(name, columns=columns, data=redact(rows))

    def log_picture(self, name: str, file: Path) -> None:
        """Show a picture, a PNG file, in W&B."""
        if self.name == "wandb":
            with self._or_without():
                self.accelerator.get_tracker(self.name).log_images({name: [str(file)]})

    def close(self) -> None:
        """End the tracker's run, and the process group. Every rank calls this."""
        with self._or_without():
            self.accelerator.end_training()
