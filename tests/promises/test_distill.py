"""distill.py, launched for real: losses by hand, the same on every launch, teachers of all kinds, kept predictions."""

import json
import math
import random
import re

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.extras.distillation import compared
from shared.models import fused_head
from shared.models.tokenizers import require_same_tokens
from shared.process.errors import ConfigError
from tests.conftest import (
    continued,
    instead,
    learn_here,
    load_template,
    make_model,
    refusal,
    run,
    sentence,
    slow,
    write_lines,
)
from tests.plain_loop import losses_of, padded_chats, turn
from tests.same import assert_goes_on, assert_same_bits, assert_same_learning
from tools import audit

LOGGED = ("loss", "kl", "cross_entropy", "teacher_cross_entropy", "agreement", "grad_norm")
EVALUATED = ("eval_kl", "eval_cross_entropy", "eval_teacher_cross_entropy", "eval_agreement")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A teacher that is sure of some tokens, of another width."""
    return make_model(tmp_path_factory.mktemp("teacher"), hidden_size=96, initializer_range=0.2)


@pytest.fixture(scope="module")
def chats():
    rng = random.Random(5)
    return [
        [turn("user", sentence(rng, rng.randint(1, 9))), turn("assistant", sentence(rng, rng.choice([1, 3, 9, 30])))]
        for _ in range(14)
    ]


@pytest.fixture(scope="module")
def file(chats, tmp_path_factory):
    return write_lines(tmp_path_factory.mktemp("chats") / "chats.jsonl", [{"messages": chat} for chat in chats])


@pytest.fixture(scope="module")
def data(tiny_model, file):
    return (
        *("--model_name_or_path", tiny_model, "--train_file", file, "--validation_file", file, "--seq_length", 128),
        *("--max_steps", 6, "--eval_steps", 3, "--save_steps", 2, "--save_total_limit", 9, "--audit_data"),
        *("--global_batch_size", 4, "--learning_rate", 5e-3, "--max_new_tokens", 6, "--per_device_eval_batch_size", 3),
        "--no_full",
    )


@pytest.fixture(scope="module")
def base(data, large):
    return (*data, "--teacher_name_or_path", large)


def load(name):
    return AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()


# Losses --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        {"divergence": "forward_kl"},
        {"divergence": "reverse_kl", "cross_entropy": 0.3},
        {"divergence": "jsd", "beta": 0.2, "temperature": 2.0},
    ],
)
def test_learns_what_a_plain_loop_learns(base, chats, tiny_model, tokenizer, large, tmp_path, monkeypatch, flags):
    """All weights; by definitions, in double precision. Also in chunks of five tokens, the last one smaller."""
    monkeypatch.setattr(compared, "chunk_size", lambda model: 5)
    given = [word for name, value in flags.items() for word in (f"--{name}", value)]
    given += ["--packing", "off", "--per_device_train_batch_size", 7, "--lr_scheduler_type", "constant"]
    given += ["--warmup_steps", 0, "--max_grad_norm", 0]
    given = [word for word in (*instead(base, "--global_batch_size", 14), *given) if word != "--no_full"]
    done = learn_here("distill", tmp_path / "run", *given)
    ids, labels, mask = padded_chats(tokenizer, chats)
    student, teacher = map(load, (tiny_model, large))
    counts = labels[:, 1:] != -100

    def loss():
        with torch.no_grad():
            taught = teacher(input_ids=ids, attention_mask=mask).logits[:, :-1][counts].double()
        logits = student(input_ids=ids, attention_mask=mask).logits[:, :-1][counts].double()
        p, q = ((x / flags.get("temperature", 1.0)).softmax(-1) for x in (taught, logits))
        beta, share = flags.get("beta"), flags.get("cross_entropy", 0.0)
        if flags["divergence"] == "forward_kl":
            each = (p * (p / q).log()).sum(-1)
        elif flags["divergence"] == "reverse_kl":
            each = (q * (q / p).log()).sum(-1)
        else:
            m = beta * p + (1 - beta) * q
            each = beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)
        text = torch.nn.functional.cross_entropy(logits, labels[:, 1:][counts])
        return (1 - share) * each.mean() + share * text

    plain = [*losses_of(student, loss, 6, 5e-3)]
    assert done.each("loss")[0] == pytest.approx(plain[0], rel=1e-6)
    assert done.each("loss") == pytest.approx(plain, rel=2e-5)
    with torch.no_grad():
        logits = teacher(ids, attention_mask=mask).logits[:, :-1]
        text = torch.nn.functional.cross_entropy(logits[counts], labels[:, 1:][counts])
    assert done.each("eval_teacher_cross_entropy") == pytest.approx([text.item()] * 3, rel=1e-5)
    assert flags["divergence"] == "jsd" or done.each("eval_loss")[-1] < done.each("eval_loss")[0]


@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jsd", 0.3)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_loss_is_that_of_trl(kind, beta, temperature):
    from trl.experimental.gkd import GKDTrainer

    template = load_template("distill")
    torch.manual_seed(0)
    student, teacher = torch.randn(2, 3, 5, 40) * 3
    labels = torch.randint(0, 40, (3, 5)).masked_fill(torch.rand(3, 5) < 0.3, -100)
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta, temperature)
    chosen = labels != -100
    s, t = ((x[chosen] / temperature).log_softmax(-1) for x in (student, teacher))
    config = template.Config(divergence=kind, beta=beta if kind == "jsd" else 0.5, temperature=temperature)
    nothing = torch.zeros(len(s))
    ours = template.divergence(config, compared.Compared(s, t, nothing, nothing, nothing))
    torch.testing.assert_close(ours.sum() / chosen.sum(), theirs, rtol=1e-6, atol=1e-6)


def test_no_more_than_a_chunk_of_logits_is_in_memory(tiny_model, large, monkeypatch):
    """Forward and backward, of 640 target tokens."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from shared.extras.distillation.teacher import Live

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.ndim == 2 and result.shape[-1] == vocab:
                self.size = max(self.size, len(result))
            return result

    from accelerate import Accelerator

    models = [*map(load, (tiny_model, large))]
    vocab = models[0].config.vocab_size
    ids = torch.randint(5, vocab, (4, 160))
    batch, teacher = {"input_ids": ids, "labels": ids}, Live(models[1])

    def measured():
        models[0].zero_grad()
        with Largest() as largest:
            loss, _ = compared.compare(models[0], teacher, batch, lambda p: -(p.teacher.exp() * p.student).sum(-1), 1.0)
            loss.backward()
        return loss.item(), models[0].get_input_embeddings().weight.grad.clone(), largest.size

    for model in models:
        assert "fused" in fused_head.fuse_head(Accelerator(cpu=True), model, kind=compared.OpenHead)
    monkeypatch.setattr(compared, "chunk_size", lambda model: 128)
    loss, gradient, most = measured()
    assert most == 128
    for model in models:
        model.fused_head = None  # as of a model that changes what its head returns
    monkeypatch.setattr(compared, "chunk_size", lambda model: 10**6)
    whole = measured()
    assert whole[0] == pytest.approx(loss, rel=1e-5) and whole[2] == 640
    torch.testing.assert_close(whole[1], gradient, rtol=1e-4, atol=1e-5)


# Launches ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half(base):
    """Every second step learns from the student's own answers."""
    return (*base, "--on_policy", 0.5, "--cross_entropy", 0.25, "--divergence", "jsd", "--per_device_train_batch_size", 2)


@pytest.fixture(scope="module")
def alone(half, tmp_path_factory):
    return learn_here("distill", tmp_path_factory.mktemp("alone") / "run", *half)


IN_SLOW = ("tensor_parallel", "deepspeed_zero2", "deepspeed_zero3", "hsdp")


@pytest.mark.parametrize("config", ["ddp", "fsdp2", *map(slow, IN_SLOW)])
def test_every_launch_learns_the_same(alone, half, tmp_path, config):
    processes = 4 if config == "hsdp" else 2
    given = instead(half, "--per_device_train_batch_size", 4 // processes)
    other = run("distill", tmp_path / "run", *given, processes=processes, config=config)
    assert len(alone.each("answer_tokens")) == 3
    for name in (*LOGGED, *EVALUATED, "answer_tokens"):
        assert other.each(name) == pytest.approx(alone.each(name), rel=1e-3, abs=2e-4), name
    assert_same_learning(alone, other, rel=1e-3, atol=None)


@pytest.mark.slow
def test_ranks_that_share_rows_learn_the_same(base, tmp_path):
    given = (*base, "--per_device_train_batch_size", 4, "--cross_entropy", 0.25)
    one = learn_here("distill", tmp_path / "one", *given)
    other = run("distill", tmp_path / "other", *given, processes=2, config="sequence_parallel")
    assert_same_learning(one, other, rel=1e-4, atol=None, keys=EVALUATED)


@pytest.mark.parametrize("config", [None, slow("fsdp2")])
def test_resumed_bit_for_bit(half, tmp_path, config):
    """On two processes after a kill, in a step on its own answers."""
    if config:
        whole = run("distill", tmp_path / "whole", *half, processes=2, config=config)
        resumed = continued("distill", tmp_path / "run", "update:kill@4", *half, processes=2, config=config)
        assert "at step 3" in resumed.output
        assert_same_bits(whole, resumed)
    else:
        given = (*(word for word in half if word != "--no_full"), "--full")
        resumed = whole = learn_here("distill", tmp_path / "whole", *given)
        start = ("--resume_from_checkpoint", tmp_path / "whole/checkpoint-000002")
        assert_goes_on(whole, learn_here("distill", tmp_path / "run", *given, *start), 2)
    assert not audit.check(resumed.folder).problems
    rows = [json.loads(line) for line in (resumed.folder / "rollouts.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [2, 4, 6]


# Teachers ------------------------------------------------------------------------------------------


def test_an_adapter_of_the_student_s_base_teaches(data, tiny_model, tmp_path):
    """As the same adapter merged into a copy of the base does; it is not trained, and not saved."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"))
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=12.0)
    tuned.save_pretrained(tmp_path / "adapter")
    merged = tuned.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(tmp_path / "merged")
    whole = learn_here("distill", tmp_path / "whole", *data, "--teacher_name_or_path", tmp_path / "merged")
    assert whole.each("kl")[0] > 0.01
    given = (*data, "--teacher_adapter", tmp_path / "adapter", "--per_device_train_batch_size", 2)
    for processes in (1, 2):
        launch = {"processes": processes, "config": ("cpu", "fsdp2")[processes - 1]}
        done = run("distill", tmp_path / f"beside-{processes}", *given, **launch)
        assert done.each("loss") == pytest.approx(whole.each("loss"), rel=1e-3)
        assert done.each("eval_kl") == pytest.approx(whole.each("eval_kl"), rel=1e-3)
        assert done.weights().keys() == whole.weights().keys()
        assert not (done.folder / "final/teacher").exists()


def test_kept_predictions_need_no_teacher_and_give_the_same(base, data, tmp_path):
    """Of all tokens, they are the teacher's; of fewer, all others count as one, which can only lower the divergence."""
    live = learn_here("distill", tmp_path / "live", *base)
    folder = ("--teacher_logits", tmp_path / "kept")
    kept = learn_here("distill", tmp_path / "first", *base, *folder, "--top_k", 320)
    for name in LOGGED[:5]:
        assert kept.each(name) == pytest.approx(live.each(name), rel=1e-4, abs=1e-6), name
    few = learn_here("distill", tmp_path / "few", *base, *folder, "--top_k", 8)
    again = run("distill", tmp_path / "again", *data, *folder, "--top_k", 8, processes=2, config="ddp")
    assert_same_learning(few, again, rel=1e-4, atol=None, keys=EVALUATED)
    assert 0.3 * live.each("kl")[0] < few.each("kl")[0] < live.each("kl")[0]
    for name in ("cross_entropy", "teacher_cross_entropy", "agreement"):
        assert few.each(name)[0] == pytest.approx(live.each(name)[0], rel=1e-5)


def test_keeping_goes_on_where_it_was_killed_and_damage_is_noticed(base, data, tmp_path, monkeypatch, capsys):
    from shared.extras.distillation import kept

    monkeypatch.setattr(kept, "PART", 4)
    given = ("--teacher_logits", tmp_path / "kept", "--top_k", 8, "--max_steps", 2)
    written = []
    original = kept._write

    def counted(values, folder):
        written.append(int(folder.name.split("-")[1][:9]))
        if len(written) == 3:
            raise KeyboardInterrupt
        original(values, folder)

    monkeypatch.setattr(kept, "_write", counted)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        learn_here("distill", tmp_path / "one", *base, *given)
    learn_here("distill", tmp_path / "two", *base, *given)
    assert written == [0, 4, 8, 8, 12]  # the validation samples are the same ones
    part = max((tmp_path / "kept").glob("*-000000004"), key=lambda path: path.stat().st_mtime)
    values = np.load(part / kept.FILE)
    values[0, 0] += 1
    np.save(part / kept.FILE, values)
    assert "which model teaches?" in refusal("distill", *data, *given, "--output_dir", tmp_path / "three")
    learn_here("distill", tmp_path / "three", *base, *given)
    assert written[5:] == [4]
    other = make_model(tmp_path / "other", hidden_size=32)
    told = refusal("distill", *data, *given, "--teacher_name_or_path", other, "--output_dir", tmp_path / "four")
    assert "of another teacher: name another --teacher_logits" in told


def test_a_teacher_in_4_bits(base, tmp_path):
    whole = learn_here("distill", tmp_path / "whole", *base, "--max_steps", 1)
    done = learn_here("distill", tmp_path / "run", *base, "--teacher_load_in_4bit", "--max_steps", 1)
    assert done.each("kl")[0] == pytest.approx(whole.each("kl")[0], rel=0.3) and done.each("kl") != whole.each("kl")
    assert "in 4 bits" in (done.folder / "summary.txt").read_text()


def test_what_cannot_be_is_one_line(data, base, large, tmp_path):
    for given, message in (
        (data, "which model teaches? Name it with --teacher_name_or_path"),
        ((*base, "--teacher_adapter", "x"), "--teacher_adapter and --teacher_name_or_path: there is one teacher"),
        ((*base, "--on_policy", 0.5, "--teacher_logits", tmp_path), "keep one of them"),
        ((*base, "--on_policy", 0.5, "--order", "length"), "--on_policy: drop --find_batch_size and --order length"),
        ((*data, "--teacher_adapter", tmp_path / "none"), "--teacher_adapter"),
        ((*(w for w in data if w != "--no_full"), "--teacher_adapter", "x"), "an adapter is trained with --no_full"),
    ):
        assert message in refusal("distill", *given, "--output_dir", tmp_path / "run")


def test_another_tokenizer_is_refused_and_a_longer_one_is_said(tiny_model, capsys):
    ours, theirs = (AutoTokenizer.from_pretrained(tiny_model) for _ in range(2))
    theirs.add_tokens(["<more>"])
    require_same_tokens(ours, theirs, "org/teacher", "student")
    assert "321 tokens, the student 320" in capsys.readouterr().err

    class Other:
        def get_vocab(self):
            return {"ab" if n == 300 else token: n for token, n in ours.get_vocab().items()}

    with pytest.raises(ConfigError, match=r"org/teacher: token 300 is 'ab', the student's is '.*': take a model with"):
        require_same_tokens(ours, Other(), "org/teacher", "student")


def test_an_adapter_of_another_base_or_without_safetensors_is_refused(data, tiny_model, tmp_path):
    model = get_peft_model(load(tiny_model), LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file({name.replace("layers", "other.layers"): value for name, value in load_file(file).items()}, file)
    given = (*data, "--teacher_adapter", tmp_path / "adapter", "--output_dir", tmp_path / "run")
    assert "is of another base" in refusal("distill", *given)
    file.rename(tmp_path / "adapter/adapter_model.bin")
    assert "there is no adapter_model.safetensors" in refusal("distill", *given)


def test_a_wider_teacher_is_compared_in_what_both_have_live_and_kept(data, tiny_model, tmp_path):
    """As of two sizes whose vocabularies are padded differently; with its scores before training."""
    wider = make_model(tmp_path / "wider", hidden_size=48, initializer_range=0.2)
    model = load(wider)
    model.resize_token_embeddings(384, mean_resizing=False)
    model.save_pretrained(wider)
    given = (*data, "--teacher_name_or_path", wider, "--eval_answers", 3, "--order", "length", "--packing", "off")
    live = learn_here("distill", tmp_path / "live", *given)
    kept = learn_here("distill", tmp_path / "kept-run", *given, "--teacher_logits", tmp_path / "kept", "--top_k", 320)
    assert kept.each("loss") == pytest.approx(live.each("loss"), rel=1e-4)
    assert len(live.each("eval_teacher_token_f1")) == 1
    narrow = (*given, "--seq_length", 300)
    assert "is longer than the model's context of 256" in refusal("distill", *narrow, "--output_dir", tmp_path / "run")


@pytest.mark.slow
def test_the_demo_learns(tmp_path):
    """Without a flag: the student comes nearer to its teacher, and to the texts."""
    demo = run("distill", tmp_path / "run")
    assert demo.each("eval_kl")[-1] < 0.5 * demo.each("eval_kl")[0]
    assert demo.each("eval_cross_entropy")[-1] < demo.each("eval_cross_entropy")[0]
    assert demo.each("eval_agreement")[-1] > demo.each("eval_agreement")[0]
    assert re.search("what the teacher answers, then the student", demo.output) and math.isfinite(demo.last("eval_loss"))
