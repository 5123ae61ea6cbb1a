"""Log-probabilities of a reference model, computed once by the model that is then trained, before
its first step.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch import nn
from tqdm import tqdm

from shared.data import prepared
from shared.models.blocks import in_eval_mode
from shared.models.hub import file_of, identity_of_weights
from shared.models.loss import log_probabilities
from shared.models.options import AdapterConfig
from shared.parallel import sharding
from shared.process.collectives import on_main
from shared.process.errors import ConfigError
from shared.process.files import cache_dir
from shared.run.prepared import Prepared
from shared.text.preferences import Pairs, one_pass


class Start(NamedTuple):
    """What the model before its first step is known by. New adapters change nothing yet."""

    weights: str
    settings: str  # how it computes with them


def identity_of_start(name: str, model: Any, adapter: AdapterConfig) -> Start:
    """Every rank calls this.

    Args:
        name: of the base model.
        model: made of it.
    """
    given = adapter.adapter_name_or_path
    weights = prepared.fingerprint(
        weights=identity_of_weights(name, model),
        adapter=given and identity_of_weights(given, files="adapter_model.safetensors"),
        quantised=adapter.load_in_4bit,
    )

    def texts_of_settings() -> list[str]:
        files = [file_of(name, "config.json"), given and file_of(given, "adapter_config.json")]
        return [Path(file).read_text("utf-8") for file in files if file]

    texts = on_main(texts_of_settings)
    versions = [transformers.__version__, prepared.source_of("models", "extras/experts")]
    return Start(weights, prepared.fingerprint(how=[texts, versions, str(model.dtype)]))


@torch.no_grad()
def add_reference(setup: Prepared, model: nn.Module, pairs: Pairs, start: Start) -> str:
    """Give pairs the log-probabilities of the model as it is now. They are kept beside the prepared
    data.

    Every rank calls this, before a checkpoint is loaded: ranks share the pairs. A run that
    continues finds them, or computes them again.

    Args:
        model: prepared.
        start: `identity_of_start`.

    Returns:
        computed, or read.

    Raises:
        ConfigError: they are not finite, or cannot be written or read.
    """
    accelerator = setup.accelerator
    precision = accelerator.mixed_precision
    key = prepared.fingerprint(pairs=pairs.samples.fingerprint, start=start, precision=precision)
    folder = cache_dir() / "reference" / key
    name = "log_probabilities.npy"
    if on_main(lambda: prepared.usable(folder)):
        pairs.reference = np.load(folder / name)
        return "read"
    # the last row is that of rows that only fill a batch, whose index is -1
    found = torch.zeros(len(pairs) + 1, 2, device=accelerator.device)
    loader = one_pass(pairs, setup.config, sharding.share(accelerator))
    steps = loader.steps_per_epoch or 0
    with in_eval_mode(model):
        for window in tqdm(loader.windows(0, steps), "reference", steps, leave=False, disable=None):
            for indices, batch in zip(window.indices, window.micro_batches, strict=True):
                count = batch["lengths"].numel()
                values = log_probabilities(model, batch, batch["answers"], count)
                found[torch.from_numpy(indices).to(found.device)] = values.view(-1, 2)
    pairs.reference = sharding.total(accelerator, found[:-1]).cpu().numpy()
    if not np.isfinite(pairs.reference).all():
        raise ConfigError(
            "the model's log-probabilities of some answers are not finite before "
            "training: use bf16 or fp32"
        )
    prepared.build_once(folder, lambda temporary: np.save(temporary / name, pairs.reference))
    return "computed"
