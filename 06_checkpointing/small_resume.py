"""Learn which points lie inside a circle."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.nn  # unused, but without it the program may crash at its end
from torch import nn
from torch.utils import data


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, default="checkpoint.pt")  # per run
    parser.add_argument("--output", type=Path, default="model.pt")
    args = parser.parse_args()
    args.checkpoint.parent.mkdir(parents=True, exist_ok=True)
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
    first, loaded = 0, [None]
    # not exists(), which could hide a disk error
    if dist.get_rank() == 0 and args.checkpoint in args.checkpoint.parent.iterdir():
        loaded = [torch.load(args.checkpoint, "cpu", weights_only=True)]
    dist.broadcast_object_list(loaded)  # all ranks get what rank 0 has read
    if loaded[0]:
        model.load_state_dict(loaded[0]["model"])
        optimizer.load_state_dict(loaded[0]["optimizer"])
        first = loaded[0]["epoch"] + 1
    if dist.get_rank() == 0:
        print(f"starting at epoch {first}")
    for epoch in range(first, 5):
        # add your seed: other numbers on each rank, the same with and without a resume
        torch.manual_seed(epoch * dist.get_world_size() + dist.get_rank())
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
        if any(weight.isnan().any() for weight in model.parameters()):
            raise ValueError("a weight is NaN: nothing is saved")
        if dist.get_rank() == 0:
            torch.save(model.state_dict(), args.output)
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            with open(f"{args.checkpoint}.tmp", "wb") as file:
                torch.save(saved | {"epoch": epoch}, file)
                file.flush()
                os.fsync(file.fileno())  # on the disk before the rename
            os.replace(f"{args.checkpoint}.tmp", args.checkpoint)  # in one step
            print(f"epoch {epoch}  accuracy {correct[0] / correct[1]:.4f}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
