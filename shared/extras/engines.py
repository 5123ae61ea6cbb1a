"""Other ways to sample answers than `generate` on the weights in training: faster, and with
probabilities that differ from those of the model that learns.
"""

import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import ContinuousBatchingConfig, GenerationConfig

from shared.data.loader import Share
from shared.models.blocks import as_in_an_evaluation
from shared.models.loading import dtype_of, save_causal_lm, without_adapters
from shared.models.weights import gather_weights
from shared.parallel import sharding
from shared.process.collectives import on_main
from shared.process.errors import ConfigError, NotNow, first_line, is_of_the_network
from shared.process.printing import print_main
from shared.run import exits
from shared.run.run import Run
from shared.run.setup import Setup

# (number of a prompt, token ids of its answer, the engine's log-probabilities of them)
Sampled = Iterator[tuple[int, list[int], list[float]]]
TIMEOUT = 3600  # seconds for an answer
BROKEN = 600  # seconds in which a server that is there answers with errors alone
MINUTE = 60
PAGE = 256  # tokens in a block of the paged cache
READ = 2048  # tokens of prompts that are read at once


def of(setup: Setup, tokenizer: Any) -> Any:
    """The engine that --rollout_engine names, and a line for the summary. Every rank calls this.

    Raises:
        ConfigError: the launch or the model does not go with it.
    """
    config = setup.config
    share = sharding.share(setup.accelerator)
    limit = f"importance weights are cut at {config.importance_cap:g}; no exact resume"
    if config.rollout_engine == "vllm":
        if config.adapter.load_in_4bit and not config.full:
            limit += "; the server's base is not the 4-bit one, unless it loads that"
        setup.about["sampling"] = f"vLLM at {config.rollout_server}: {limit}"
        return Server(config, tokenizer, share)
    setup.about["sampling"] = f"continuous batching of transformers: {limit}"
    return Continuous(config, share)


class Continuous:
    """Continuous batching of transformers, on the weights in training, with a paged cache."""

    def __init__(self, config: Any, share: Share) -> None:
        self.share = share
        self.at_once = config.batch.per_device_eval_batch_size

    def renew(self, run: Run, model: nn.Module) -> None:
        """Nothing: it reads the weights themselves.

        Raises:
            ConfigError: this process has only a part of them.
        """
        whole = run.unwrap(model)
        is_whole = isinstance(model, DistributedDataParallel) or model is whole
        if is_whole and not any(hasattr(p, "device_mesh") for p in model.parameters()):
            return
        raise ConfigError(
            "--rollout_engine continuous: needs all weights in each process (one process, or DDP)"
        )

    def answers(
        self,
        model: nn.Module,
        ends: Sequence[int],
        prompts: Sequence[list[int]],
        limits: Sequence[int],
        draws: np.ndarray,
    ) -> Sampled:
        """Yield this rank's part, sampled at temperature 1."""
        max_new_tokens = max(limits)
        mine = range(self.share.rank, len(prompts), self.share.world_size)
        whole: Any = without_adapters(model)
        before = whole.config._attn_implementation
        settings = GenerationConfig(
            max_new_tokens=max_new_tokens,
            eos_token_id=[*ends],
            pad_token_id=0,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
        )
        longest = max(map(len, prompts)) + max_new_tokens
        batching = ContinuousBatchingConfig(
            return_logprobs=True,
            seed=seed_of(draws[mine.start]) if mine else 0,
            max_requests_per_batch=self.at_once,
            # not most of the memory that is free, which learning needs
            page_size=PAGE,
            auto_switch_to_flash=whole.dtype != torch.float32,  # which it cannot read
            num_blocks=self.at_once * math.ceil(longest / PAGE),
            max_batch_tokens=max(self.at_once, READ),
        )
        of_instance = vars(whole).get("forward")  # Accelerate's, with autocast
        computes = getattr(whole, "_original_forward", whole.forward)

        def forward(*args: Any, **named: Any) -> Any:
            # in the precision of the cache, by a thread that does not see other contexts
            half = whole.dtype != torch.float32
            with torch.autocast(whole.device.type, whole.dtype if half else None, enabled=half):
                return computes(*args, **named)

        whole.forward = forward
        try:
            with as_in_an_evaluation(model), torch.no_grad():
                found = whole.generate_batch(
                    [prompts[number] for number in mine],
                    generation_config=settings,
                    continuous_batching_config=batching,
                )
        finally:
            del whole.forward
            if of_instance:
                whole.forward = of_instance
            whole.set_attn_implementation(before)
        by_request = sorted(found.items(), key=lambda item: int(item[0].rpartition("_")[2]))
        for number, (_, result) in zip(mine, by_request, strict=True):
            if result.error:
                raise RuntimeError(f"continuous batching: {result.error}")
            yield number, result.generated_tokens, result.logprobs


class Server:
    """A vLLM server in an environment of its own: adapters, or with --full all weights, are written
    to a folder that it reads, too.

    Args:
        config: with `rollout_server`, its address, and `full`.
    """

    def __init__(self, config: Any, tokenizer: Any, share: Share) -> None:
        import httpx2

        logging.getLogger("httpx2").setLevel(logging.WARNING)
        self.config = config
        self.tokenizer = tokenizer
        self.share = share
        key = os.environ.get("VLLM_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.client = httpx2.Client(
            base_url=config.rollout_server,
            timeout=httpx2.Timeout(TIMEOUT, connect=10),
            headers=headers,
            limits=httpx2.Limits(max_connections=None),
        )
        # other runs, and this one before a kill, have other weights at the same step
        self.name = on_main(lambda: uuid.uuid4().hex)
        self.folder = Path()
        self.base = ""
        self.lost = False  # whether it was away since the weights were sent
        self.guard: Any = None  # of the run: it knows of a signal

    def renew(self, run: Run, model: nn.Module) -> None:
        """Send the present weights. Every rank calls this."""
        self.guard = run.guard
        full = self.config.full
        name = self.config.model_name_or_path
        dtype = dtype_of(name)
        weights = gather_weights(
            run.accelerator, model, trainable_only=not full, dtype=dtype if full else None
        )
        last = self.folder
        self.folder = (run.dir / f"sampler/{self.name}-{run.state.step}").resolve()
        if run.is_main:
            discard = partial(shutil.rmtree, self.folder.parent, ignore_errors=True)
            discard()
            if not last.name:
                exits.at_the_end(discard)
            whole = run.unwrap(model)
            if full:
                save_causal_lm(self.folder, whole, weights, self.tokenizer, dtype=dtype, base=name)
            else:
                whole.save_pretrained(
                    self.folder,
                    state_dict=weights,
                    save_embedding_layers=False,
                    selected_adapters=["default"],
                )
                self._post("/v1/unload_lora_adapter", {"lora_name": last.name}, may_fail=True)
            self._load()
        run.accelerator.wait_for_everyone()
        self.base = self._get_base()

    def _get_base(self) -> str:
        models = self._asked("GET", "/v1/models").json()["data"]
        return str(next(model["id"] for model in models if not model.get("parent")))

    def _load(self) -> None:
        self.lost = False
        if self.config.full:
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(self.folder)}}
            self._post("/collective_rpc", body)
            self._post("/reset_prefix_cache", {})
        else:
            body = {"lora_name": self.folder.name, "lora_path": str(self.folder)}
            response = self._post("/v1/load_lora_adapter", body, may_fail=True)
            if "already" not in response.text:  # by another rank
                self._check(response)

    def answers(
        self,
        model: nn.Module,
        ends: Sequence[int],
        prompts: Sequence[list[int]],
        limits: Sequence[int],
        draws: np.ndarray,
    ) -> Sampled:
        """Yield this rank's part, sampled at temperature 1. Every rank calls this. While the server
        is away, it waits.
        """
        mine = range(self.share.rank, len(prompts), self.share.world_size)

        def answer(number: int) -> tuple[int, list[int], list[float]]:
            body = {
                "model": self.base if self.config.full else self.folder.name,
                "prompt": prompts[number],
                "max_tokens": limits[number],
                "seed": seed_of(draws[number]),
                "stop_token_ids": [*ends],
                "logprobs": 1,
                "return_token_ids": True,
                # the server's defaults may be those of the model's generation settings
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
            }
            (choice,) = self._post("/v1/completions", body).json()["choices"]
            ids = choice.get("token_ids") or []
            values = (choice.get("logprobs") or {}).get("token_logprobs") or []
            if not 0 < len(ids) == len(values) or None in values:
                raise ConfigError(
                    f"{self.config.rollout_server}: {len(values)} log-probabilities of "
                    f"{len(ids)} tokens: is it a vLLM server that knows return_token_ids?"
                )
            return number, ids, values

        while True:
            with ThreadPoolExecutor(self.config.batch.per_device_eval_batch_size) as threads:
                found = [*threads.map(answer, mine)]
            # one that came back has the weights that it began with
            if not (self.config.full and any(gather_object([self.lost]))):
                break
            self._load()
            gather_object([None])
        yield from found

    def _post(self, path: str, body: Any, may_fail: bool = False) -> Any:
        return self._asked("POST", path, may_fail, json=body)

    def _asked(self, method: str, path: str, may_fail: bool = False, **content: Any) -> Any:
        """The server's answer, however long it takes.

        Raises:
            ConfigError: it refuses.
        """
        import httpx2

        began = time.monotonic()
        said = began - MINUTE
        while True:
            try:
                response = self.client.request(method, path, **content)
                if (
                    response.status_code == 404
                    and not may_fail
                    and self.folder.name in str(content)
                ):
                    self._load()  # it has begun anew, without the adapter
                    response = self.client.request(method, path, **content)
                if not (may_fail and response.is_client_error):
                    self._check(response)
                return response
            except httpx2.HTTPError as error:
                if not is_of_the_network(error):
                    raise ConfigError(f"--rollout_server: {first_line(error)}") from None
                self.lost = True
                code = getattr(getattr(error, "response", None), "status_code", 503)
                is_broken = code != 503 and time.monotonic() - began > BROKEN
                if is_broken or isinstance(error, httpx2.ReadTimeout):
                    raise NotNow(
                        f"--rollout_server {self.config.rollout_server}{path}: {first_line(error)}"
                    ) from None
                if time.monotonic() - said >= MINUTE:
                    said = time.monotonic()
                    print_main(
                        f"waiting for the vLLM server at {self.config.rollout_server}: "
                        f"{first_line(error)}"
                    )
                if self.guard.received:  # the others may wait for this one's answers
                    stopped = exits.Stopped("stopped while waiting for the vLLM server")
                    stopped.alone = True
                    raise stopped from None
                time.sleep(1)

    def _check(self, response: Any) -> None:
        """Raise ConfigError if the server refuses, and an error of the network if it fails."""
        if response.is_client_error:
            text = " ".join(response.text.split())[:300]
            raise ConfigError(f"{response.url}: {response.status_code} {text}")
        response.raise_for_status()


def seed_of(draws: np.ndarray) -> int:
    """A seed that depends on what the draws depend on: the run's seed, the rollout, the row."""
    return int(draws[0] * 2**31)
