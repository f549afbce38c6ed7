"""The networks that the scripts train, and the schedule of the learning rate."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as activation_checkpoint


class ConvNet(nn.Module):
    """Two convolution blocks and a linear layer: [N, 1, 28, 28] to logits [N, 10].

    It has 29,034 parameters.
    """

    def __init__(self):
        super().__init__()
        self.layer1 = block(1, 16)
        self.layer2 = block(16, 32)
        self.fc = nn.Linear(7 * 7 * 32, 10)
        if not torch.cuda.is_available():  # channels-last: a third faster on the CPU
            self.to(memory_format=torch.channels_last)

    def forward(self, images):
        return self.fc(self.layer2(self.layer1(images)).flatten(1))


def block(channels_in, channels_out):
    """[N, channels_in, height, width] to [N, channels_out, height / 2, width / 2]."""
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=5, padding=2),
        nn.BatchNorm2d(channels_out),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


class VisionTransformer(nn.Module):
    """Images [N, 1, 28, 28] to logits [N, 10], from 16 patches: arXiv:2010.11929."""

    def __init__(self, width, depth, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.patches = nn.Conv2d(1, width, kernel_size=7, stride=7)
        self.positions = nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions.weight
        for block in self.blocks:
            if self.recompute:  # keep no activations: compute them again in backward
                tokens = activation_checkpoint(block, tokens, use_reentrant=False)
            else:
                tokens = block(tokens)
        return self.head(self.norm(tokens).mean(1))


class Block(nn.Module):
    """Self-attention with 4 heads and an MLP: [N, patches, width] to the same shape.

    Each patch sees all patches. A language model needs is_causal=True, or it sees what
    it must predict.
    """

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, tokens):
        qkv = self.qkv(self.norm1(tokens)).unflatten(2, (3, 4, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [N, 4, patches, width / 4]
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        tokens = tokens + self.out(attended.transpose(1, 2).flatten(2))
        return tokens + self.down(nn.functional.gelu(self.up(self.norm2(tokens))))


def warmup_then_decay(fraction):
    """The factor of the peak rate at this fraction of the run, from 0 to 1.

    Linear warm-up for 40 % of the run, then linear decay to 0.
    """
    return max(0, min(fraction / 0.4, (1 - fraction) / 0.6))
