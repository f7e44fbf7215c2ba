"""Writes tests/golden/: a small GPT-2 and what PyTorch makes of it, in llm.c's file formats. For tests/test_model.py.

    python tests/make_golden.py

The model is made of PyTorch's own parts, in float64, and shares no line with this project; nor does the writing of the
files. PyTorch is needed for this script alone (2.13 made what is in the repository).
"""

import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

GOLDEN = Path(__file__).parent / "golden"
MAX_T, V, VP, L, NH, C = 16, 97, 128, 2, 2, 32  # heads of 16, the smallest that every attention kernel takes; T is odd
B, T = 2, 7
ADAMW = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}  # decays all parameters


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.attproj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.fc, self.fcproj = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        q, k, v = (part.unflatten(2, (NH, -1)).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, dim=2))
        x = x + self.attproj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.fcproj(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.lnf = nn.Embedding(V, C), nn.Embedding(MAX_T, C), nn.LayerNorm(C)
        self.blocks = nn.ModuleList(Block() for _ in range(L))

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lnf(x) @ self.wte.weight.T

    def tensors(self):
        """The parameters in llm.c's order; those of the blocks as lists."""
        yield from ([self.wte.weight], [self.wpe.weight])
        for layer in ("ln1", "qkv", "attproj", "ln2", "fc", "fcproj"):
            for part in ("weight", "bias"):
                yield [getattr(getattr(block, layer), part) for block in self.blocks]
        yield from ([self.lnf.weight], [self.lnf.bias])


def flat(tensors) -> np.ndarray:
    """Float32, wte padded with zero rows to VP."""
    pieces = [tensor.detach().numpy().astype("<f4").ravel() for group in tensors for tensor in group]
    return np.insert(np.concatenate(pieces), V * C, np.zeros((VP - V) * C, "<f4"))


def header(*values: int) -> bytes:
    return np.pad(np.array(values, "<i4"), (0, 256 - len(values))).tobytes()


def main():
    generator = torch.Generator().manual_seed(1337)
    model = GPT2().double()
    with torch.no_grad():
        for group in model.tensors():
            for tensor in group:  # a float32 number each, so that the checkpoint holds exactly this model
                noise = 0.1 * torch.randn(tensor.shape, generator=generator)
                is_gain = any(tensor is norm.weight for norm in model.modules() if isinstance(norm, nn.LayerNorm))
                tensor.copy_((noise + is_gain).float())
    tokens = torch.randint(0, V, (B, T + 1), generator=generator)
    tokens[0, 3] = tokens[0, 1]  # a token that comes twice
    x, y = tokens[:, :-1], tokens[:, 1:]

    parameters = flat(model.tensors())
    lr, *betas, eps, weight_decay = ADAMW.values()
    optimizer = torch.optim.AdamW(model.parameters(), lr, betas, eps, weight_decay)
    losses = []
    for step in range(10):
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            state = logits.detach(), loss.item(), flat([tensor.grad for tensor in group] for group in model.tensors())
        optimizer.step()
        losses.append(loss.item())

    GOLDEN.mkdir(exist_ok=True)
    with open(GOLDEN / "gpt2_golden.bin", "wb") as file:
        file.write(header(20240326, 3, MAX_T, V, L, NH, C, VP) + parameters.tobytes())
    with open(GOLDEN / "gpt2_golden_debug_state.bin", "wb") as file:
        file.write(header(20240327, 2, B, T))
        for array, dtype in zip((x, y, *state), ("<i4", "<i4", "<f4", "<f4", "<f4"), strict=True):
            file.write(np.asarray(array).astype(dtype).tobytes())
    (GOLDEN / "gpt2_golden.json").write_text(
        json.dumps({"adamw": ADAMW, "losses_of_ten_steps": losses}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
