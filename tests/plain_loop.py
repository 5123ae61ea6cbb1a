"""What a plain loop needs, by hand: nothing of shared/, but for the number of rows that packing makes."""

import math

import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms.v2.functional import InterpolationMode, pil_to_tensor, resize

from shared.text import chat
from shared.text.options import ChatConfig
from shared.text.packing import Packed


def turn(role, content):
    return {"role": role, "content": content}


def padded_chats(tokenizer, conversations):
    """(ids, labels, attention mask), [conversations, longest] each, of a question and an answer in the default template.

    The loss counts the answer and the end-of-text token.
    """
    samples = []
    for user, assistant in conversations:
        prompt = f"### User:\n{user['content']}\n\n### Assistant:\n"
        whole = prompt + assistant["content"] + tokenizer.eos_token + "\n\n"
        encoded = tokenizer(whole, return_offsets_mapping=True)
        end = len(whole) - 2
        learned = [len(prompt) <= start < end for start, _ in encoded["offset_mapping"]]
        samples.append((encoded["input_ids"], learned))
    longest = max(len(ids) for ids, _ in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for i, (tokens, learned) in enumerate(samples):
        ids[i, : len(tokens)], mask[i, : len(tokens)] = torch.tensor(tokens), 1
        labels[i, : len(tokens)] = torch.where(torch.tensor(learned), torch.tensor(tokens), -100)
    return ids, labels, mask


def number_of_rows(tokenizer, chats, length: int) -> int:
    """Into which a file of chats is packed."""
    settings = ChatConfig(train_file=(str(chats),), validation_file=(str(chats),), seq_length=length)
    return len(Packed(chat.open_samples(settings, tokenizer)[0], length))


def pixels_of(paths, size=16):
    """[images, 3, size, size]: resized, and normalised by ImageNet's mean and deviation."""
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    images = [resize(pil_to_tensor(Image.open(path)), [size, size], InterpolationMode.BICUBIC) for path in paths]
    return (torch.stack(images).float() / 255 - mean[:, None, None]) / std[:, None, None]


def loss_of_chats(model, ids, labels, mask):
    logits = model(input_ids=ids, attention_mask=mask).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def losses_of(model, loss_of, steps: int, rate: float, *, warmup=None, clip=math.inf, decays=lambda *_: False, beta=0.999):
    """The loss of each step of AdamW, yielded after the update.

    With `warmup`, the rate rises for so many steps and then falls as a cosine. Weights that `decays` names do so by 0.1.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [{"params": [p for n, p in trained if decays(n, p) is on], "weight_decay": 0.1 * on} for on in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, beta))
    for step in range(steps):
        if warmup is not None:
            falling = (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
            for group in optimizer.param_groups:
                group["lr"] = rate * ((step + 1) / warmup if step < warmup else falling)
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
