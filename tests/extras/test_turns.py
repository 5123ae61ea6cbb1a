"""Several answers in a conversation: what is between them is read, not learned; the same on every launch."""

import json
import re
import subprocess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.config.options import BatchConfig
from shared.data.loader import Share
from shared.data.notes import Notes
from shared.extras.turns import Turns
from shared.models.generation import generate
from shared.process.errors import ConfigError
from shared.rollouts.options import PromptConfig
from shared.rollouts.prompts import read_prompts
from shared.rollouts.rollouts import Rollouts, plain
from shared.text.encoder import Encoder
from shared.text.forms import Example
from tests.chats import CHATML, MARKED, chat_tokenizer, headed, learned_runs, marked
from tests.conftest import ROOT, load_template, refusal, run, slow, write_lines
from tests.same import assert_same_bits

END = "<|im_end|>"
TEMPLATES = {  # as those of known models write it, with the control tokens of the tests
    "chatml": CHATML,
    "marked": MARKED,
    "marked with its line": headed(marked("{{ m['content'] + '<|im_end|>\n' }}")),
    "thought of the last answer": headed("{{ m['content'] + '<|im_end|>\n' }}").replace(
        "assistant\n' }}{% endif %}", "assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
    ),
    "stripped": headed("{{ (m['content'] | trim) + '<|im_end|>' }}"),
    "parts": headed("{{ m['content'][0]['text'] + '<|im_end|>\n' }}"),
    "roles renamed": CHATML.replace("m['role']", "{'tool': 'observation'}.get(m['role'], m['role'])"),
    "results in a user's turn": CHATML.replace(
        "m['role'] + '\n' }}",
        "{'tool': 'user'}.get(m['role'], m['role']) + '\n' }}"
        "{% if m['role'] == 'tool' %}{{ '<tool_response>\n' }}{% endif %}",
    ),
    "instructions": "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}"
    "{% else %}{{ '[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}",
    "a blank line after the end": "{% for m in messages %}{{ '<|pause|>' + m['role'] + '<|return|>' + m['content'] }}"
    "{{ '<|im_end|>' if m['role'] == 'assistant' else '' }}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|pause|>assistant<|return|>' }}{% endif %}",
    "asked for calls": "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') }}"
    "{% for c in m['tool_calls'] or [] %}{{ c }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "none of its own": None,
}
TALK = [
    {"role": "user", "content": "what is 2 + 2?"},
    {"role": "assistant", "content": "call: 2 + 2"},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "it is five"},
    {"role": "user", "content": "read again"},
    {"role": "assistant", "content": "it is 4"},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_between_answers_is_what_the_template_writes_there(tiny_model, name):
    tokenizer = chat_tokenizer(tiny_model, TEMPLATES[name])
    encoder = Encoder(tokenizer, "assistant")
    whole, learned = encoder(Example(TALK), "here")
    runs = [whole[start:stop] for start, stop in learned_runs(learned)]
    said = [TALK[n]["content"] for n in (1, 3, 5)]
    assert [tokenizer.decode(ids).strip()[: len(text)] for ids, text in zip(runs, said, strict=True)] == said
    turns = Turns(lambda messages, record: TALK[len(messages) : len(messages) + 1], tokenizer, 3)
    asked = []

    def answers(prompts, most, draws):
        asked.append(prompts[0])
        ids = runs[len(asked) - 1]
        stop = 1 + next((n for n, token in enumerate(ids) if token in encoder.end_tokens), len(ids))
        yield 0, ids[:stop]

    end = [*encoder.end_tokens]
    prompt = encoder.prompt(Example(TALK[:1]), "here", Notes())
    ((number, ids),) = turns.answers(answers, [(prompt, [], {"conversation": TALK[:1]})], 400, end)
    assert number == 0 and len(asked) == 3
    text = tokenizer.decode(prompt + plain(ids))
    empty = "<think>\n\n</think>\n\n" if "thought" in name else ""  # the prompt has it, a finished conversation not
    assert text.replace(empty, "").rstrip() == tokenizer.decode(whole).rstrip()
    if not empty:  # the tokens, too, and which of them are learned
        together = prompt + plain(ids)
        mask = np.array([False] * len(prompt) + [token >= 0 for token in ids])
        assert together == whole[: len(together)]
        also = learned[: len(together)] & ~mask  # the end of a line that a template marks
        assert not (mask & ~learned[: len(together)]).any()
        assert not tokenizer.decode(np.array(together)[also]).strip()


TURN = """    import os, pathlib, signal
    marker = pathlib.Path(os.environ.get("KILL_AT", "/"))
    turn.calls = getattr(turn, "calls", 0) + 1
    if turn.calls == 30 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    said = messages[-1]["content"]
    if len(said) % 3 == 1 and len(messages) < 4:
        return None
    return [{"role": "tool", "content": f"{len(said)} "}, {"role": "user", "content": "go on"}]
"""


@pytest.fixture(scope="module")
def talkative(tiny_model, tmp_path_factory):
    """(a template with a `turn`, flags): a model whose answers end soon."""
    folder = tmp_path_factory.mktemp("talkative")
    model = AutoModelForCausalLM.from_pretrained(tiny_model)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    model.generation_config.eos_token_id = [*range(0, len(tokenizer), 3)]
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    text = (ROOT / "templates/grpo.py").read_text()
    before = 'is all before it."""\n    return None\n'
    assert before in text
    edited = text.replace(before, before.replace("    return None\n", TURN))
    before = 'return {"correct": solves(answer, right), "format": 0.1 * bool(numbers_in(answer))}'
    assert before in edited
    (folder / "grpo.py").write_text(edited.replace(before, 'return {"length": float(len(answer) % 5)}'))
    records = [{"prompt": f"{a} + {b} = ", "answer": str(a + b)} for a in range(4) for b in range(3)]
    records = [{"messages": [{"role": "user", "content": r["prompt"]}], "answer": r["answer"]} for r in records]
    file = write_lines(folder / "sums.jsonl", records)
    flags = ("--model_name_or_path", folder / "model", "--train_file", file, "--validation_file", file, "--max_turns", 3)
    flags += ("--max_new_tokens", 160, "--global_batch_size", 4, "--group_size", 4, "--per_device_train_batch_size", 3)
    flags += ("--per_device_eval_batch_size", 3, "--max_steps", 4, "--eval_steps", 2, "--save_steps", 1, "--full")
    flags += ("--eval_answers", 5, "--learning_rate", 1e-3, "--updates_per_rollout", 2, "--audit_data")
    return folder / "grpo", flags


LOGGED = ("loss", "grad_norm", "reward", "answer_tokens", "cut_answers", "eval_reward", "clipped")


@pytest.fixture(scope="module")
def whole(talkative, tmp_path_factory):
    template, flags = talkative
    return run(str(template), tmp_path_factory.mktemp("whole") / "run", *flags)


@pytest.mark.parametrize("config", ["fsdp2", slow("tensor_parallel")])
def test_conversations_are_the_same_on_two_ranks(talkative, whole, tmp_path, config):
    """Also where a rank has nothing to answer in a round, but its part of the weights."""
    template, flags = talkative
    other = run(str(template), tmp_path / "run", *flags, processes=2, config=config)
    assert len(whole.each("grad_norm")) == 4 and min(whole.each("grad_norm")) > 1e-3
    for name in LOGGED:
        assert other.each(name) == pytest.approx(whole.each(name), abs=2e-4), name
    rows = [json.loads(line) for line in (whole.folder / "rollouts.jsonl").read_text().splitlines()]
    assert max(row["answer"].count("go on") for row in rows) == 2  # three answers
    for name in ("rollouts.jsonl", "answers.jsonl"):
        assert (other.folder / name).read_text() == (whole.folder / name).read_text(), name


def test_killed_between_turns_it_goes_on_bit_for_bit(talkative, whole, tmp_path):
    template, flags = talkative
    env = {"KILL_AT": str(tmp_path / "killed")}
    killed = run(str(template), tmp_path / "run", *flags, env=env, check=False)
    assert killed.returncode != 0 and (tmp_path / "killed").exists()
    assert [*(tmp_path / "run").glob("checkpoint-*")]
    assert_same_bits(run(str(template), tmp_path / "run", *flags, env=env), whole)


@pytest.mark.slow
def test_log_probabilities_of_another_engine_stand_beside_their_tokens(talkative, tmp_path):
    template, flags = talkative
    done = run(str(template), tmp_path / "run", *flags, "--rollout_engine", "continuous")
    rows = (done.folder / "rollouts.jsonl").read_text()
    assert "go on" in rows and max(done.each("sampler_difference")) < 1e-3 and max(done.each("truncated")) == 0


def test_what_is_sampled_and_learned_is_that_of_a_plain_loop(talkative, monkeypatch):
    template, flags = talkative
    module = load_template(str(template))
    folder, file = flags[1], flags[3]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    options = PromptConfig(train_file=(str(file),), max_turns=3)
    prompts, _ = read_prompts(SimpleNamespace(data=options), tokenizer)
    sizes = {"per_device_train_batch_size": 3, "per_device_eval_batch_size": 5}
    config = SimpleNamespace(group_size=4, dynamic_sampling=0, updates_per_rollout=1, max_new_tokens=160, data=options)
    config.batch = BatchConfig(global_batch_size=4, **sizes)
    monkeypatch.setenv("KILL_AT", str(folder))
    turns = Turns(module.turn, tokenizer, 3)
    rollouts = Rollouts(config, prompts, tokenizer, Share(0, 1, torch.device("cpu")), turns)
    state = SimpleNamespace(state=SimpleNamespace(step=1), is_main=False)
    sums, _ = rollouts.sample(state, model, lambda answer, record: {"length": len(answer) + len(record["prompt"])})
    ends = set(model.generation_config.eos_token_id)
    wanted = torch.full_like(rollouts.tensors["answers"], -1)
    advantages = (sums - sums.mean(1, keepdim=True)).flatten()
    rollouts.tensors["advantages"].copy_(advantages)
    total, tokens, counts = 0.0, 0, []
    for row in range(16):
        prompt, _, record = prompts.prompt(int(rollouts.order.indices(0)[row // 4]))
        draws = np.random.default_rng((rollouts.order.seed, 0, row)).random(160)
        messages, after, answers = [*record["conversation"]], [], 0
        while True:
            ids = prompt + plain(after)
            settings = {"max_new_tokens": 160 - len(after), "ends": ends, "draws": draws[None, len(after) :]}
            after += generate(model, [ids], **settings)[0]
            answers += 1
            answer = (prompt + plain(after))[len(ids) :]
            messages.append({"role": "assistant", "content": tokenizer.decode(answer[: -(answer[-1] in ends) or None])})
            more = module.turn(messages, record) if answers < 3 and answer[-1] in ends else None
            if not more:
                break
            text = "".join(f"### {m['role'].capitalize()}:\n{m['content']}\n\n" for m in more)
            between = tokenizer("\n\n" + text + "### Assistant:\n", add_special_tokens=False)["input_ids"]
            if len(after) + len(between) >= 160:
                break
            after += [-2 - token for token in between]
            messages += more
        counts.append(answers)
        wanted[row, : len(after)] = torch.tensor(after)
        logits = model(torch.tensor([prompt + plain(after)])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        learned = [n for n, token in enumerate(after) if token >= 0]
        total += -float(advantages[row]) * sum(float(logits[n, after[n]]) for n in learned)
        tokens += len(learned)
    assert {1, 2, 3} >= {*counts} and max(counts) == 3 and min(counts) < 3
    assert (wanted < -1).any() and torch.equal(rollouts.tensors["answers"], wanted)
    made, count, _ = rollouts.micro_batches(1, "token")
    assert count == tokens
    loss = module.PolicyLoss(module.Config(full=True), model)
    # old = policy: the ratio is 1, and the loss minus the sum of advantages; its gradient is that of `total`
    model.zero_grad()
    sum(loss(batch) for batch in made).backward()
    gradient = torch.cat([p.grad.flatten().clone() for p in model.parameters()])
    model.zero_grad()
    for row in range(16):
        prompt, *_ = prompts.prompt(int(rollouts.order.indices(0)[row // 4]))
        after = [token for token in wanted[row].tolist() if token != -1]
        logits = model(torch.tensor([prompt + plain(after)])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        (-advantages[row] * sum(logits[n, token] for n, token in enumerate(after) if token >= 0)).backward()
    plain_gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (gradient - plain_gradient).norm() < 1e-6 * plain_gradient.norm() and plain_gradient.norm() > 1


def test_the_template_gets_tools_and_options_in_each_turn(tiny_model, tmp_path):
    template = "{{ tools[0]['function']['name'] if tools }}" + CHATML.replace(
        "assistant\n' }}{% endif %}", "assistant\n' }}{{ '' if thinking else '<|pause|>' }}{% endif %}"
    )
    tokenizer = chat_tokenizer(tiny_model, template)
    record = {"messages": TALK[:1], "tools": [{"type": "function", "function": {"name": "add"}}], "answer": "4"}
    record["chat_template_kwargs"] = {"thinking": True}
    file = write_lines(tmp_path / "asked.jsonl", [record] * 20)
    options = SimpleNamespace(data=PromptConfig(train_file=(str(file),), max_turns=2))
    sample = read_prompts(options, tokenizer)[0].prompt(0)
    turns, end = Turns(lambda messages, record: TALK[2:3], tokenizer, 2), tokenizer.convert_tokens_to_ids(END)
    ((_, ids),) = turns.answers(lambda *asked: [(0, [7, end])], [sample], 90, [end])
    assert tokenizer.decode(sample[0]).startswith("add") and not tokenizer.decode(plain(ids)).count("<|pause|>")


def test_wrong_turns_are_one_line(talkative, tiny_model, tmp_path):
    _, flags = talkative
    tokenizer = AutoTokenizer.from_pretrained(flags[1])
    for returned in ("text", [{"content": "no role"}], {"role": "user"}):
        turns = Turns(lambda messages, record, returned=returned: returned, tokenizer, 2)
        with pytest.raises(ConfigError, match=r"turn returns .*, expected a list of messages, or None"):
            [*turns.answers(lambda *asked: [(0, [1])], [([5], [], {"conversation": TALK[:1]})], 9, [1])]
    turns = Turns(lambda messages, record: record["no such key"], tokenizer, 2)
    with pytest.raises(ConfigError, match=r"test_turns\.py:\d+: turns = .*: KeyError: 'no such key'; the answer is ''"):
        [*turns.answers(lambda *asked: [(0, [1])], [([5], [], {"conversation": TALK[:1]})], 9, [1])]
    file = write_lines(tmp_path / "texts.jsonl", [{"prompt": f"{n} = ", "answer": "1"} for n in range(9)])
    given = ("--model_name_or_path", tiny_model, "--train_file", file, "--max_turns", 2)
    assert "needs messages, or a model with a chat template" in refusal("grpo", *given, "--output_dir", tmp_path / "run")


def examples() -> list[dict]:
    """What the code blocks of the page that define `turn` define."""
    page = (ROOT / "docs/rewards.md").read_text().partition("## Several turns")[2].partition("\n## ")[0]
    made = []
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        names = {"Any": Any, "re": re}
        exec(block.replace("RLIMIT_CPU, (5, 5)", "RLIMIT_CPU, (1, 1)"), names)
        made.append(names)
    return made


@pytest.mark.skipif(subprocess.run(["unshare", "-rn", "true"]).returncode != 0, reason="no namespaces for users here")
def test_the_examples_of_the_page_work():
    calculator, code = examples()
    results = {"2 * (3 + 4) / 7": "2.0", "2 ** 99": "numbers and", "1 / 0": "zero", "__import__('os')": "numbers"}
    for asked, result in results.items():
        (message,) = calculator["turn"]([{"role": "assistant", "content": f"<calculate>{asked}</calculate>"}], {})
        assert message["role"] == "tool" and result in message["content"]
    assert calculator["turn"]([{"role": "assistant", "content": "it is 4"}], {}) is None

    record = {"tests": "assert double(4) == 8"}
    right, wrong = (f"```python\ndef double(n):\n    return n * {by}\n```" for by in (2, 3))
    assert code["turn"]([{"role": "assistant", "content": right}], record) is None
    (message,) = code["turn"]([{"role": "assistant", "content": wrong}], record)
    assert message["role"] == "user" and "AssertionError" in message["content"]
    assert [code["rewards"](answer, record) for answer in (right, wrong, "none")] == [{"passes": n} for n in (1.0, 0.0, 0.0)]
    limits = {  # memory; network; files; time
        "b = bytes(2**31)": "MemoryError",
        "import socket; socket.create_connection(('127.0.0.1', 22), 3)": "Error",
        "import socket; socket.create_connection(('1.1.1.1', 53), 3)": "unreachable",
        "open('big', 'wb').write(bytes(2**21))": "Error",
        "import os; assert not os.environ.get('HOME')": "",
    }
    for text, error in limits.items():
        done = code["tried"](text)
        assert error in done.stderr and bool(done.returncode) == bool(error), (text, done)
    assert code["tried"]("while True: pass").returncode != 0
