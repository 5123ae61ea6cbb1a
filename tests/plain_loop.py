"""What a plain loop needs, by hand: nothing of shared/, but for the number of rows that packing makes."""

import torch
import torch.nn.functional as F

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


def losses_of(model, ids, labels, mask, steps: int, rate: float):
    """The loss of each step of AdamW with all samples at once, yielded before the next."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate, weight_decay=0.0)
    for _ in range(steps):
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
