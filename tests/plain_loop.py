"""What a plain loop needs, by hand: nothing of shared/."""

import torch


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
