"""Learn which points lie inside a circle."""

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused, but without it the program may crash at its end
from torch import nn
from torch.utils import data


def main():
    torch.manual_seed(0)
    points = torch.randn(1000, 2)
    labels = (points.norm(dim=1) < 1).long()  # inside the circle
    train = data.TensorDataset(points[:700], labels[:700])
    test = data.TensorDataset(points[700:], labels[700:])
    device = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank())
        device = torch.device("cuda")
    dist.init_process_group()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} on {device}")
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ddp_model = nn.parallel.DistributedDataParallel(model)
    train_loader = data.DataLoader(train, 16, sampler=data.DistributedSampler(train))
    part = range(dist.get_rank(), len(test), dist.get_world_size())
    test_loader = data.DataLoader(test, 100, sampler=part)
    for epoch in range(5):
        train_loader.sampler.set_epoch(epoch)
        model.train()
        for x, y in train_loader:
            loss = nn.functional.cross_entropy(ddp_model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        correct = torch.zeros(2, device=device)  # correct samples, all samples
        with torch.no_grad():
            for x, y in test_loader:
                correct[0] += (model(x.to(device)).argmax(1) == y.to(device)).sum()
                correct[1] += len(y)
        dist.all_reduce(correct)
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), "model.pt")
            print(f"epoch {epoch}  accuracy {correct[0] / correct[1]:.4f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
