"""Learn which of three spirals a point lies on, on one GPU or the CPU."""

import argparse
import math
import random
from pathlib import Path

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split

EPOCHS = 30
BATCH_SIZE = 60
NOISE = 0.01


def spirals(count):
    """Points on three noisy spirals [count, 2], and the spiral of each [count]."""
    spiral = torch.arange(count) % 3
    radius = torch.rand(count)
    angle = 6 * radius + spiral * 2 * math.pi / 3 + 0.1 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), spiral


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, help="default: a random one")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seed = random.randrange(2**32) if args.seed is None else args.seed
    print(f"seed {seed}")
    torch.manual_seed(seed)
    train_set, test_set = random_split(TensorDataset(*spirals(1500)), [1200, 300])
    train_loader = DataLoader(train_set, BATCH_SIZE, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=100)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    ).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=2)
    step, running, best = 0, 0.0, math.inf
    for epoch in range(1, EPOCHS + 1):
        model.train()
        total = 0.0
        for points, labels in train_loader:
            points, labels = points.to(device), labels.to(device)
            points = points + NOISE * torch.randn_like(points)  # augmentation
            loss = criterion(model(points), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            total += loss.item()
            running = 0.95 * running + 0.05 * loss.item()
            if step % 100 == 0:
                print(f"step {step}  running loss {running:.4f}")
        total = total / len(train_loader)
        loss = validate(model, test_loader, criterion, device)
        scheduler.step(loss)
        print(f"epoch {epoch}  training {total:.4f}  validation {loss:.4f}")
        if loss < best:
            best = loss
            torch.save(model.state_dict(), "best.pt")
            points, _ = next(iter(test_loader))
            draw(points, model(points.to(device)).argmax(1), "best.txt")


@torch.no_grad()
def validate(model, test_loader, criterion, device):
    """The mean loss of all test points."""
    model.eval()
    total = 0.0
    for points, labels in test_loader:
        points, labels = points.to(device), labels.to(device)
        total += criterion(model(points), labels).item()
    return total / len(test_loader)


def draw(points, found, path):
    """Write a picture of points in letters, each of which is the spiral found."""
    lines = [[" "] * 80 for _ in range(40)]
    for (x, y), spiral in zip(points.tolist(), found.tolist(), strict=True):
        lines[round(19.5 + 19 * y)][round(39.5 + 39 * x)] = "abc"[spiral]
    Path(path).write_text("\n".join(map("".join, lines)))


if __name__ == "__main__":
    main()
