"""Other engines that sample: the weights in training are theirs at each rollout, and what differs is weighed."""

import os
import signal
import sys
import threading
import urllib.request
from types import SimpleNamespace

import pytest
import torch

from shared.extras import engines
from shared.process.errors import ConfigError
from shared.run import exits
from tests.conftest import LAUNCHER, ROOT, free_port, load_template, refusal, run, slow, write_lines

KEY = {"VLLM_API_KEY": "a-key-that-no-log-has"}


class Keeper:
    """Starts a stand-in of vLLM's server, and starts it anew when it ends."""

    def __init__(self, model, dies_after=0):
        self.port, self.starts, self.ended = free_port(), 0, False
        self.address = f"http://127.0.0.1:{self.port}"
        self.model, self.dies_after = model, dies_after
        self.thread = threading.Thread(target=self.keep, daemon=True)

    def keep(self):
        while not self.ended:
            words = [ROOT / "tests/vllm_stand_in.py", self.port, self.model]
            words += [self.dies_after] if not self.starts and self.dies_after else []
            self.starts += 1
            env = {**os.environ, **KEY, "PYTHONPATH": str(ROOT)}
            self.process = LAUNCHER.start(words, sys.__stdout__, sys.__stderr__, env)
            self.process.wait()

    def __enter__(self):
        LAUNCHER.address()  # started by this thread alone
        self.thread.start()
        return self

    def __exit__(self, *error):
        self.ended = True
        os.kill(self.process.pid, signal.SIGKILL)
        self.thread.join()


@pytest.fixture(scope="module")
def base(tiny_model, tmp_path_factory):
    records = [{"prompt": f"{a} + {b} = ", "answer": str(a + b)} for a in range(6) for b in range(4)]
    file = write_lines(tmp_path_factory.mktemp("sums") / "sums.jsonl", records)
    flags = ("--model_name_or_path", tiny_model, "--train_file", file, "--validation_file", file, "--max_new_tokens", 8)
    flags += ("--global_batch_size", 4, "--group_size", 4, "--per_device_train_batch_size", 8, "--learning_rate", 5e-3)
    flags += ("--per_device_eval_batch_size", 5, "--max_steps", 3, "--eval_steps", 3, "--save_steps", 3)
    return tiny_model, (*flags, "--eval_answers", 4, "--show_answers", 0, "--epsilon_high", 0.2)


NAMES = ("loss", "grad_norm", "reward", "answer_tokens", "entropy", "eval_reward")


@pytest.mark.parametrize("flags", [(), slow(("--full", "--updates_per_rollout", 2))], ids=["adapters", "all weights"])
def test_a_server_samples_from_the_present_weights_and_may_go_away(base, tmp_path, flags):
    model, given = base
    given = (*given, *flags, "--rollout_engine", "vllm", "--rollout_server")
    with Keeper(model) as keeper:
        whole = run("grpo", tmp_path / "whole", *given, keeper.address, env=KEY)
        two = run("grpo", tmp_path / "two", *given, keeper.address, env=KEY, processes=2)
    with Keeper(model, dies_after=25) as keeper:  # in the second rollout of sixteen answers
        left = run("grpo", tmp_path / "left", *given, keeper.address, env=KEY)
        assert keeper.starts == 2
    assert f"waiting for the vLLM server at {keeper.address}" in left.output
    assert max(whole.each("sampler_difference")) < 1e-4 and max(whole.each("truncated")) == 0  # also after updates
    assert len(whole.each("grad_norm")) == 3 and max(whole.each("grad_norm")) > 1e-2
    for name in NAMES:
        assert left.each(name) == whole.each(name), name  # the same answers
        assert two.each(name) == pytest.approx(whole.each(name), abs=2e-4), name
    assert f"vLLM at {keeper.address}: importance weights are cut at 2; no exact resume" in left.summary
    texts = [path.read_text(errors="replace") for path in whole.folder.rglob("*") if path.is_file()]
    assert not any(KEY["VLLM_API_KEY"] in text for text in (*texts, whole.output))
    assert not (whole.folder / "sampler").exists()


def test_wrong_servers_are_one_line(base, tmp_path, monkeypatch):
    model, given = base
    given = (*given, "--rollout_engine", "vllm", "--output_dir", tmp_path / "run", "--rollout_server")
    with Keeper(model) as keeper:
        while True:
            try:
                urllib.request.urlopen(f"{keeper.address}/v1/models")
                break
            except OSError:
                continue
        monkeypatch.setenv("VLLM_API_KEY", "another")
        line = refusal("grpo", *given, keeper.address)
    assert f"{keeper.address}/v1/" in line and "401" in line and "unauthorised" in line


@pytest.mark.parametrize(
    ("processes", "precision", "flags", "error"),
    [(1, "no", (), 1e-3), (1, "bf16", (), 0.2), slow(2, "bf16", ("--full",), 0.2)],
)
def test_continuous_batching_samples_from_the_weights_in_training(base, tmp_path, processes, precision, flags, error):
    given = (*base[1], *flags, "--rollout_engine", "continuous")
    done = run("grpo", tmp_path / "run", *given, processes=processes, precision=precision)
    assert max(done.each("sampler_difference")) < error and max(done.each("truncated")) == 0
    assert len(done.each("grad_norm")) == 3 and max(done.each("grad_norm")) > 1e-2
    assert "continuous batching of transformers: importance weights are cut at 2; no exact resume" in done.summary


def test_continuous_batching_of_a_part_of_the_weights_is_refused(base, tmp_path):
    given = (*base[1], "--rollout_engine", "continuous")
    other = run("grpo", tmp_path / "run", *given, processes=2, config="fsdp2", check=False)
    assert other.returncode and "--rollout_engine continuous: needs all weights in each process" in other.output


def test_a_signal_ends_the_wait_for_a_server():
    server = engines.Server(SimpleNamespace(rollout_server=f"http://127.0.0.1:{free_port()}"), None, None)
    server.guard = SimpleNamespace(received=signal.SIGTERM)
    with pytest.raises(exits.Stopped, match="while waiting for the vLLM server"):
        server._get_base()


def test_weights_of_importance_are_cut_and_counted(tiny_model):
    grpo = load_template("grpo")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    loss = grpo.PolicyLoss(grpo.Config(full=True, importance_cap=1.5), model)
    ids, labels = torch.arange(1, 9)[None], torch.full((1, 8), -100)
    labels[0, 3:8] = torch.tensor([4, 5, 6, 7, 9])
    log_p = model(ids).logits[0, 3:8].log_softmax(-1)[range(5), labels[0, 3:8]]
    sampled = log_p.detach() - torch.tensor([0.0, 1.0, -1.0, 0.3, 0.5])  # ratios e**0, e, 1/e, e**.3, e**.5
    advantages = torch.tensor([1.0, -2.0, 3.0, 0.5, 1.0])
    from shared.text.packing import collate_padded

    batch = collate_padded([{"input_ids": ids[0].numpy(), "labels": labels[0].numpy()}], multiple_of=1)
    batch |= {"advantages": advantages, "weights": torch.ones(5), "old": torch.zeros(5), "sampled": sampled}
    seen = {}
    value = loss(batch, log=lambda **named: seen.update(named))
    value.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    cut = torch.tensor([1.0, 1.5, 2.718281828**-1, 2.718281828**0.3, 1.5])
    log_p = model(ids).logits[0, 3:8].log_softmax(-1)[range(5), labels[0, 3:8]]
    (-(cut * advantages * log_p).sum()).backward()
    wanted = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (gradient - wanted).norm() < 1e-5 * wanted.norm() and seen["truncated"] == 2
    assert float(seen["sampler_difference"]) == pytest.approx(2.8, abs=1e-5)
    with pytest.raises(ConfigError, match="needs all weights in each process"):
        engines.Continuous.renew(None, type("Run", (), {"unwrap": lambda self, model: None})(), model)
