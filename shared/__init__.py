"""What is tedious or silently wrong when written by hand, for the scripts in `templates/`."""

import os

# Here, since huggingface_hub reads it when it is imported. Whoever wants to report sets these to 0
# and true.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
# W&B's own crash reports, to another company's server
os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

__version__ = "0.2.0"
