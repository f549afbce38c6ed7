import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    torch.manual_seed(0)
    points = torch.randn(1000, 2)
    labels = (points.norm(dim=1) < 1).long()  # inside the circle
    train_set = TensorDataset(points[:700], labels[:700])
    test_set = TensorDataset(points[700:], labels[700:])

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_loader = DataLoader(train_set, batch_size=16, shuffle=True)
    test_loader = DataLoader(test_set, batch_size=100)
    for epoch in range(5):
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        correct = torch.zeros(2, device=device)  # correct samples, all samples
        for x, y in test_loader:
            right = model(x.to(device)).argmax(1) == y.to(device)
            correct += torch.stack([right.sum(), torch.tensor(len(y), device=device)])
        print(f"epoch {epoch}  accuracy {correct[0] / correct[1]:.4f}")
        torch.save(model.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
