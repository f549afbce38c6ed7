"""Learn which of three spirals a point lies on, on one GPU or the CPU."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split

EPOCHS = 30
SEED = 0
NOISE = 0.01


def spirals(count):
    """Points on three noisy spirals [count, 2], and the spiral of each [count]."""
    spiral = torch.arange(count) % 3
    radius = torch.rand(count)
    angle = 6 * radius + spiral * 2 * math.pi / 3 + 0.1 * torch.randn(count)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), spiral


def main():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(SEED)
    train_set, test_set = random_split(TensorDataset(*spirals(1500)), [1200, 300])
    train_loader = DataLoader(train_set, batch_size=64, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=100)
    model = nn.Sequential(
        nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)
    ).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.3, patience=2)
    best = math.inf
    for epoch in range(1, EPOCHS + 1):
        model.train()
        for points, labels in train_loader:
            points, labels = points.to(device), labels.to(device)
            points = points + NOISE * torch.randn_like(points)  # augmentation
            loss = criterion(model(points), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        loss = validate(model, test_loader, criterion, device)
        scheduler.step(loss)
        rate = optimizer.param_groups[0]["lr"]
        print(f"epoch {epoch}  validation loss {loss:.4f}  rate {rate:.6f}", flush=True)
        if loss < best:
            best = loss
            torch.save(model.state_dict(), "best.pt")


@torch.no_grad()
def validate(model, test_loader, criterion, device):
    """The mean loss of all test points."""
    model.eval()
    total = torch.zeros(2, device=device)  # the sum of the losses, the number of points
    for points, labels in test_loader:
        points, labels = points.to(device), labels.to(device)
        total[0] += criterion(model(points), labels) * len(labels)
        total[1] += len(labels)
    return (total[0] / total[1]).item()


if __name__ == "__main__":
    main()
