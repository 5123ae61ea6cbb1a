"""Answers that the model in training samples: which tokens, what they are worth, what is learned from them."""

import itertools
import json
import math
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.answers.answers import log_answers
from shared.answers.numbers import with_total
from shared.config.options import BatchConfig
from shared.data.loader import Share
from shared.models.generation import generate
from shared.process.errors import ConfigError
from shared.rollouts.options import PromptConfig
from shared.rollouts.prompts import describe, read_prompts
from shared.rollouts.rollouts import Rollouts
from tests.conftest import load_template, write_lines

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_and_tokenizer(tiny_model):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(tiny_model)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory, model_and_tokenizer):
    """(to train on, to validate on): of several lengths."""
    records = [{"prompt": f"{'the ' * (number % 5)}number {number}", "answer": str(number)} for number in range(24)]
    file = write_lines(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", records)
    return read_prompts(SimpleNamespace(data=PromptConfig(train_file=(str(file),))), model_and_tokenizer[1])


def at(step: int) -> SimpleNamespace:
    """A run at this step, which keeps no rows."""
    return SimpleNamespace(state=SimpleNamespace(step=step), is_main=False)


def rollouts_of(prompts, tokenizer, share=None, *, updates=1, max_new_tokens=6, per_device=3, batch=4) -> Rollouts:
    config = SimpleNamespace(group_size=4, dynamic_sampling=0, updates_per_rollout=updates, max_new_tokens=max_new_tokens)
    sizes = {"per_device_train_batch_size": per_device, "per_device_eval_batch_size": 5}
    config.batch = BatchConfig(global_batch_size=batch, **sizes)
    config.data = PromptConfig()
    return Rollouts(config, prompts, tokenizer, share or Share(0, 1, CPU))


def test_draws_choose_tokens_by_their_probabilities_whatever_the_batch(model_and_tokenizer):
    model, tokenizer = model_and_tokenizer
    prompt = tokenizer("the model", add_special_tokens=False)["input_ids"]
    count = 500
    draws = np.tile(((np.arange(count) + 0.5) / count)[:, None], 2)
    found = generate(model, [prompt] * count, max_new_tokens=1, ends=(), draws=draws[:, :1])
    with torch.no_grad():
        wanted = model(torch.tensor([prompt])).logits[0, -1].double().softmax(-1) * count
    seen = torch.bincount(torch.tensor(found).flatten(), minlength=len(wanted))
    assert (seen - wanted).abs().max() <= 1  # an even grid of draws meets each token as often as it is likely
    assert len(set(map(tuple, found))) > 50

    others = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a", "a line of text that is longer")]
    draws = np.random.default_rng(0).random((3, 9))
    together = generate(model, [others[0], prompt, others[1]], max_new_tokens=9, ends=(), draws=draws)
    alone = generate(model, [prompt], max_new_tokens=9, ends=(), draws=draws[1:2])
    assert alone[0] == together[1] and len(alone[0]) == 9


def test_a_rollout_is_the_same_on_two_ranks_and_repeats(model_and_tokenizer, prompts, monkeypatch):
    model, tokenizer = model_and_tokenizer

    def reward(answer, record):
        return {"length": float(len(answer)), "answer": float(record["answer"])}

    one = rollouts_of(prompts[0], tokenizer)
    assert (one.tensors["answers"] == -1).all()
    rewards, means = one.sample(at(3), model, reward)
    assert 0 <= means["rollout_seconds"] < 600
    assert rewards.shape == (4, 4) and means["reward"] == pytest.approx(means["reward/length"] + means["reward/answer"])
    answers = one.tensors["answers"].clone()
    texts = [tokenizer.decode(row[row >= 0], skip_special_tokens=True) for row in answers]
    numbers = [float(prompts[0].prompt(int(index))[2]["answer"]) for index in one.order.indices(2)]
    assert rewards.flatten().tolist() == [len(text) + numbers[row // 4] for row, text in enumerate(texts)]
    assert len(set(texts)) > 12 and means["answer_tokens"] == (answers >= 0).sum(1).double().mean()
    one.sample(at(4), model, reward)
    assert not torch.equal(one.tensors["answers"], answers)
    one.tensors["answers"].fill_(7)
    one.sample(at(3), model, reward)
    assert torch.equal(one.tensors["answers"], answers)

    parts = []
    for rank in (0, 1):  # each keeps what it would send
        half = rollouts_of(prompts[0], tokenizer, Share(rank, 2, CPU))
        with monkeypatch.context() as patched, pytest.raises(StopIteration):
            send = lambda found: parts.append(dict(found)) or next(iter(()))  # noqa: E731
            patched.setattr("shared.rollouts.rollouts.gather_object", send)
            half.sample(at(3), model, reward)
    assert not parts[0].keys() & parts[1].keys() and len(parts[0] | parts[1]) == 16
    assert all(answers[row, : len(ids)].tolist() == ids for row, (ids, *_) in (parts[0] | parts[1]).items())


def test_training_and_evaluation_give_a_reward_the_same_record_and_the_same_ends(model_and_tokenizer, tmp_path):
    """References are typed as in the data, texts as they are written, and the model's settings name an end."""
    references = [["a", "b"], {"city": "Rome"}, None, 7, True, " text "]
    rows = [{"prompt": f"  number {number}\n", "reference": value} for number, value in enumerate(references)]
    file = write_lines(tmp_path / "prompts.jsonl", rows)
    model, tokenizer = model_and_tokenizer
    data = PromptConfig(train_file=(str(file),), validation_file=(str(file),))
    prompts = read_prompts(SimpleNamespace(data=data), tokenizer)
    end = generate(model, [prompts[0].prompt(0)[0]], max_new_tokens=1, ends=())[0][0]
    seen = {"training": [], "evaluation": []}

    def reward(where, answer, record):
        seen[where].append((answer, record))
        return {"length": float(len(answer))}

    run = at(1)
    run.dir, run.is_main = tmp_path, True
    run.config = SimpleNamespace(show_answers=0, eval_answers=6, max_new_tokens=40, batch=BatchConfig())
    run.config.evaluation = SimpleNamespace(metric_for_best_model="length")
    run.accelerator, run.is_last, run.watch, run.logger = Accelerator(cpu=True), False, lambda rows, _: rows, MagicMock()
    rollouts = rollouts_of(prompts[0], tokenizer, batch=6, max_new_tokens=40)
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = [end]
    try:
        _, means = rollouts.sample(run, model, partial(reward, "training"))
        log_answers(run, model, prompts[1], tokenizer, partial(reward, "evaluation"))
    finally:
        model.generation_config.eos_token_id = before
    wanted = sorted(json.dumps(row, sort_keys=True) for row in rows)
    assert sorted({json.dumps(record, sort_keys=True) for _, record in seen["training"]}) == wanted
    assert sorted(json.dumps(record, sort_keys=True) for _, record in seen["evaluation"]) == wanted
    sampled = [[token for token in row.tolist() if token >= 0] for row in rollouts.tensors["answers"]]
    assert rollouts.tensors["answers"].min() == -1
    cut = [ids for ids in sampled if ids[-1] not in (end, tokenizer.eos_token_id)]
    assert any(ids[-1] == end for ids in sampled) and all(len(ids) == 40 for ids in cut)
    assert means["cut_answers"] == len(cut) / len(sampled) < 1
    assert not any(end in ids[:-1] for ids in sampled)
    kept = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    first = prompts[0].prompt(int(rollouts.order.indices(0)[0]))[0]
    assert [row["answer"] for row in kept] == [tokenizer.decode(ids) for ids in sampled[:4]]
    assert {(row["step"], row["prompt"]) for row in kept} == {(1, tokenizer.decode(first))}
    assert any(answer != answer.strip() for answer, _ in seen["training"])
    assert "" in [answer for answer, _ in seen["evaluation"]]  # it begins with that end


def test_rewards_are_any_numbers(model_and_tokenizer, prompts):
    """Whole numbers alone made the tensor of rewards one of integers, which has no mean."""
    model, tokenizer = model_and_tokenizer
    for values in ((0, 1), (True, False), (np.float32(0), np.int64(1)), (torch.tensor(0.0), torch.tensor([1])), (0, 1.0)):
        counter = itertools.count()
        rollouts = rollouts_of(prompts[0], tokenizer)
        rewards, means = rollouts.sample(at(1), model, lambda *_, v=values, c=counter: {"right": v[next(c) % 2]})
        assert rewards.dtype == torch.float32 and means["reward"] == means["reward/right"] == 0.5
    rewards, means = rollouts_of(prompts[0], tokenizer).sample(at(1), model, lambda *_: {})
    assert not rewards.any() and means["reward"] == 0
    counter = itertools.count()
    _, means = rollouts_of(prompts[0], tokenizer).sample(at(1), model, lambda *_: {"long": 1} if next(counter) % 4 else {})
    assert means["reward/long"] == 0.75  # a part that an answer does not have is 0
    for wrong in ({"right": math.nan}, {"right": None}, {"right": "1"}, {"right": torch.zeros(2)}, 1.0):
        with pytest.raises(ConfigError, match=r"test_rollouts\.py:\d+: <lambda> of the answer '.*expected finite") as caught:
            rollouts_of(prompts[0], tokenizer).sample(at(1), model, lambda *_, w=wrong: w)
        assert "\n" not in str(caught.value)
    score = with_total(lambda *_: {"reward": np.int64(1), "format": True})  # a part that is named like the sum
    assert json.dumps(score("", {})) == '{"reward": 2.0, "format": 1.0}'


def test_a_rollout_takes_the_place_of_a_loader(prompts, model_and_tokenizer):
    rollouts = rollouts_of(prompts[0], model_and_tokenizer[1], batch=5, updates=3)
    assert rollouts.steps_per_epoch == 3 * 4
    windows = list(rollouts.windows(9, 15))  # the last rollout of an epoch, and the first of the next
    assert [window.num_samples for window in windows] == [5, 0, 0, 5, 0, 0]
    assert [window.epoch for window in windows] == [0, 0, 0, 1, 1, 1]
    for window, number in ((windows[0], 3), (windows[3], 4)):
        assert sorted(window.indices[window.indices >= 0].tolist()) == sorted(rollouts.order.indices(number).tolist())
    assert {(w.num_targets, w.epoch_samples, len(w.micro_batches)) for w in windows} == {(0, 20, 0)}
    assert not (windows[1].indices >= 0).any()
    batch = rollouts.longest(3)
    longest = max(len(prompts[0].prompt(number)[0]) for number in range(len(prompts[0])))
    assert batch["input_ids"].shape == (3, math.ceil((longest + 5) / 16) * 16) and len(batch["targets"]) == 3 * 6
    assert batch["filled"].tolist() == 3 * [longest + 5]
    assert all(batch[name].shape == (18,) and not batch[name].any() for name in ("advantages", "weights", "old"))
    with pytest.raises(ConfigError, match="fewer than one --global_batch_size"):
        rollouts_of(prompts[0], model_and_tokenizer[1], batch=len(prompts[0]) + 1)


REWARDS = torch.tensor([[0.0, 1, 1, 0], [0.1, 0.1, 1.1, 0], [0.5, 0.5, 0.5, 0.5], [3, -1, 0.2, 0.7]])


@pytest.fixture
def given(prompts, model_and_tokenizer):
    """given(rewards, share, per_device, ...): grpo.py, its config, and rollouts: answers of 1 to 6 random tokens."""
    template = load_template("grpo")

    def make(rewards=REWARDS, share=None, per_device=3, **changes):
        config = template.Config(max_new_tokens=6, group_size=4, **changes)
        sizes = {"updates": config.updates_per_rollout, "per_device": per_device}
        rollouts = rollouts_of(prompts[0], model_and_tokenizer[1], share, **sizes)
        generator = torch.Generator().manual_seed(1)
        for answer in rollouts.tensors["answers"]:
            length = int(torch.randint(1, 7, (), generator=generator))
            answer[:length] = torch.randint(5, 300, (length,), generator=generator)
        rollouts.tensors["answers"][0, 0] = 0  # a token as any other
        rollouts.tensors["advantages"][:] = template.advantages_of(config, rewards).flatten()
        return template, config, rollouts

    return make


def asked(rollouts: Rollouts, row: int) -> list[int]:
    """The prompt of an answer of step 3."""
    return rollouts.prompts.prompt(int(rollouts.order.indices(2 // rollouts.updates)[row // 4]))[0]


def loss_and_gradients(template, config, rollouts: Rollouts, model) -> tuple[float, dict]:
    """Those of step 3, whose weights are not those that sampled if it is a second update."""
    batches, tokens, prompts_of = rollouts.micro_batches(3, config.normalise)
    indices = rollouts.order.indices(2 // config.updates_per_rollout)
    for batch, numbers in zip(batches, prompts_of, strict=True):
        assert batch["input_ids"].shape[1] % 16 == 0
        assert numbers == [indices[row // 4] for row in dict.fromkeys(batch["rows"].tolist())]
    filled = [batch["filled"].tolist() for batch in batches]  # of similar length, the longest first
    assert all(min(one) >= max(other) for one, other in itertools.pairwise(filled))
    if config.updates_per_rollout > 1:
        rollouts.note_old(model, batches)
        with torch.no_grad():  # ratios are far from 1
            for parameter in model.parameters():
                parameter.mul_(1.05 if parameter.requires_grad else 1)
    total = sum(template.PolicyLoss(config, model)(batch) for batch in batches) / tokens
    total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    model.zero_grad()
    return total.item(), gradients


def plain_loss(rollouts, config, model) -> torch.Tensor:
    """The formulas of the papers, one answer at a time."""
    terms, kept, tokens = [], 0, 0
    for row, ids in enumerate(rollouts.tensors["answers"].tolist()):
        of_group = REWARDS[row // 4]
        if of_group.max() == of_group.min():
            continue
        answer, prompt = [token for token in ids if token >= 0], asked(rollouts, row)
        logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        logp = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]
        old = rollouts.tensors["old"][row, : len(answer)] if config.updates_per_rollout > 1 else logp.detach()
        advantage = of_group[row % 4] - of_group.mean()
        if config.scale_rewards:
            advantage = advantage / (of_group.std() + 1e-4)
        ratio = (logp - old).exp()
        clipped = ratio.clamp(1 - config.epsilon_low, 1 + config.epsilon_high)
        loss = -torch.minimum(ratio * advantage, clipped * advantage)
        terms.append(loss.mean() if config.normalise == "answer" else loss.sum())
        kept, tokens = kept + 1, tokens + len(answer)
    return sum(terms) / {"token": tokens, "answer": kept, "constant": kept * 6}[config.normalise]


@pytest.mark.parametrize("normalise", ["token", "answer", "constant"])
@pytest.mark.parametrize("updates", [1, 2])
def test_the_loss_is_that_of_the_papers(tiny_model, given, normalise, updates):
    template, config, rollouts = given(normalise=normalise, updates_per_rollout=updates, scale_rewards=updates == 1)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    loss, gradients = loss_and_gradients(template, config, rollouts, model)
    expected = plain_loss(rollouts, config, model)
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-4)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-3


@pytest.mark.parametrize(("ranks", "rewards"), [(2, REWARDS), (5, REWARDS * torch.tensor([[1.0], [0], [0], [0]]))])
def test_several_ranks_learn_what_one_does(given, model_and_tokenizer, ranks, rewards):
    """The micro-batches of all together are those of one, also of an odd number of answers, and where a rank has none."""

    def of_rank(rank, ranks):
        template, config, rollouts = given(rewards, Share(rank, ranks, CPU), per_device=5)
        batches, tokens, _ = rollouts.micro_batches(1, "token")
        return batches, tokens, sum(template.PolicyLoss(config, model_and_tokenizer[0])(batch) for batch in batches)

    whole, parts = of_rank(0, 1), [of_rank(rank, ranks) for rank in range(ranks)]
    assert {tokens for _, tokens, _ in parts} == {whole[1]}
    assert whole[1] == sum(len(batch["targets"]) for batches, *_ in parts for batch in batches)
    assert {len(batches) for batches, *_ in parts} == {math.ceil(sum(map(bool, rewards.std(1).tolist())) * 4 / 5 / ranks)}
    torch.testing.assert_close(sum(loss for *_, loss in parts), whole[2], atol=1e-5, rtol=1e-5)


def test_groups_that_are_all_equal_are_left_out_unless_there_are_no_others(given, model_and_tokenizer):
    for rewards, answers in ((REWARDS, 12), (torch.full((4, 4), 0.1), 16)):
        template, config, rollouts = given(rewards)
        batches, *_ = rollouts.micro_batches(1, "token")
        assert sum(len(batch["labels"]) for batch in batches) == answers
    assert sum(template.PolicyLoss(config, model_and_tokenizer[0])(batch) for batch in batches) == 0


def test_numbers_are_compared_as_numbers():
    rewards = load_template("grpo").rewards
    right = {"answer": "70 * 1,000 = 70,000 #### 70,000"}
    for answer, correct in (("70000", 1), ("it is 70,000.00.", 1), ("5,000", 0), ("70,000 or 3", 0), ("none", 0)):
        assert rewards(answer, right)["correct"] == correct
    assert rewards("0", {"answer": 0})["correct"] == 1 and rewards("nothing", {"answer": "?"})["correct"] == 0
    assert rewards("4", {"reference": "It is 4."})["correct"] == 1


def test_forms_of_prompts(tmp_path, model_and_tokenizer, capsys):
    _, tokenizer = model_and_tokenizer
    file, described = tmp_path / "prompts.jsonl", []

    def read(*records, **options):
        write_lines(file, records)
        data = PromptConfig(train_file=(str(file),), validation_file=(str(file),), **options)
        train, held_out = read_prompts(SimpleNamespace(data=data), tokenizer)
        described.append(describe(train, held_out, data))
        return [(tokenizer.decode(ids), columns) for ids, _, columns in map(train.prompt, range(len(train)))]

    user, said = {"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}
    assert read({"question": "2 + 2 =", "answer": "#### 4"}) == [("2 + 2 =", {"answer": "#### 4"})]
    asked = "### User:\n2 + 2\n\n### Assistant:\n"
    assert read({"messages": [user, said], "points": 3}) == [(asked, {"reference": "4", "points": 3})]
    assert read({"messages": json.dumps([user, said])}) == [(asked, {"reference": "4"})]
    assert read({"prompt": "[3, 1, 2] sorted:"}) == [("[3, 1, 2] sorted:", {})] and read({"prompt": "[3, 1]"})
    pairs = '[{"a": 1}]'
    assert read({"prompt": pairs}) == [(pairs, {})] and read({"question": "[]", "label": 2}) == [("[]", {"label": 2})]
    assert read({"prompt": "2 +", "tools": [{"name": "add"}]}) == [("2 +", {"tools": [{"name": "add"}]})]
    assert read({"prompt": [user]}, {"prompt": [user] * 30}, seq_length=40) == [(asked, {})]
    assert read({"task": "2 + 2 =", "prompt": 1}, prompt_column="task") == [("2 + 2 =", {"prompt": 1})]
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:1: none of the columns task is the prompt"):
        read({"task": "2 + 2 ="})
    with pytest.raises(ConfigError, match="--system_prompt needs a model with a chat template"):
        read({"prompt": "2 + 2 ="}, system_prompt="Think.")
    for wrong, message in (
        ({"prompt": "2 +", "system": "Think."}, "a system text, which only a chat template takes"),
        ({"question": 5}, "'question' is an int, expected text or messages"),
        ({"messages": '[{"role": "human", "content": "2 +"}]'}, "message 1 has role 'human'"),
    ):
        with pytest.raises(ConfigError, match=rf"prompts\.jsonl:1: .*{message}"):
            read(wrong)
    assert read({"prompt": "2 +", "images": ["a.png"]}, allow_unused_columns=("images",))
    capsys.readouterr()
    end = tokenizer.eos_token
    read({"prompt": [user | {"content": f"<image>2 + {end}", "picture": "a.png"}]}, {"prompt": f"{end}3 + 3"})
    said = capsys.readouterr().err
    assert "1 records mark a place for what is not text" in said
    unread = [line.partition("; not used: ")[2] for line in described]
    assert [*filter(None, unread)] == ["tools", "picture (of messages)"]
    assert f"2 texts contain the string of a special token, which is read as that token; the first is {file}:1" in said
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:1: has tools, but the chat template does not write them"):
        read({"prompt": [user], "tools": [{"name": "add", "parameters": {}}]})
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    try:
        ((prompt, _),) = read({"prompt": "2 + 2"}, system_prompt="Think.")
        assert prompt == "<system>Think.</s><user>2 + 2</s><assistant>"
        assert read({"prompt": "2 + 2", "system": "Think."}) == [(prompt, {})]
        with pytest.raises(ConfigError, match="has a system text: drop the column, or --system_prompt"):
            read({"prompt": "2 + 2", "system": "Think."}, system_prompt="Think more.")
    finally:
        tokenizer.chat_template = None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("normalise", "loss_type", "updates", "kl"),
    [("token", "dapo", 1, 0.0), ("answer", "grpo", 2, 0.0), ("constant", "dr_grpo", 2, 0.0), ("token", "dapo", 2, 0.04)],
)
def test_the_loss_is_that_of_trl(tiny_model, tmp_path, given, model_and_tokenizer, normalise, loss_type, updates, kl):
    """TRL's GRPOTrainer on the same answers and rewards, with adapters."""
    from datasets import Dataset
    from peft import LoraConfig, get_peft_model
    from trl import GRPOConfig, GRPOTrainer

    rewards = REWARDS.clone()
    rewards[2, 0] = 2.0  # TRL counts groups without spread
    template, config, rollouts = given(rewards, normalise=normalise, updates_per_rollout=updates, kl_coef=kl)
    base, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32), model_and_tokenizer[1]
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    loss, gradients = loss_and_gradients(template, config, rollouts, model)

    options = {"loss_type": loss_type, "beta": kl, "epsilon": 0.2, "epsilon_high": 0.28, "num_iterations": updates}
    options |= {"num_generations": 4, "per_device_train_batch_size": 16, "max_completion_length": 6}
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    trainer = GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(str(tmp_path), **options, report_to="none", use_cpu=True, bf16=False),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 16),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    texts = [asked(rollouts, row) for row in range(16)]
    longest, answers = max(map(len, texts)), rollouts.tensors["answers"]
    inputs = {
        "prompt_ids": torch.tensor([[0] * (longest - len(ids)) + ids for ids in texts]),
        "prompt_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in texts]),
        "completion_ids": answers.clamp(min=0),
        "completion_mask": (answers >= 0).long(),
        "advantages": ((rewards - rewards.mean(1, True)) / (rewards.std(1, keepdim=True) + 1e-4)).flatten(),
        "num_items_in_batch": (answers >= 0).sum(),
    }
    if updates > 1:
        inputs["old_per_token_logps"] = rollouts.tensors["old"]
    if kl:
        whole = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        with torch.no_grad(), model.disable_adapter():
            found = trainer._get_per_token_logps_and_entropies(model, whole, mask, 6)
        inputs["ref_per_token_logps"] = found[0]
    trainer.model.train()
    theirs = trainer._compute_loss(trainer.model, inputs)
    theirs.backward()
    assert loss == pytest.approx(theirs.item(), abs=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, atol=1e-5, rtol=1e-3)
    assert max(gradient.abs().max() for gradient in gradients.values()) > 1e-4
