"""A plain DDP recipe on MNIST, which benchmark.md compares with 04.

    torchrun --standalone --nproc-per-node=2 tests/copies/recipe.py 15 [--amp]

It reads single samples through a default DataLoader, keeps contiguous tensors, uses Adam at 1e-3,
gathers every batch at evaluation, and ends at an accuracy of 99 % or after so many epochs.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import MNIST
from torchvision.transforms import ToTensor

sys.path.insert(1, str(Path(__file__).resolve().parent.parent.parent))
from common.gather import all_gather
from common.model import ConvNet

CUDA = torch.cuda.is_available()


def train(epochs, amp):
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local_rank) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if CUDA else "gloo", device_id=device if CUDA else None)
    torch.manual_seed(0)
    train_set, test_set = [MNIST("data", train, ToTensor()) for train in (True, False)]
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, 128, sampler=train_sampler)
    test_loader = DataLoader(test_set, 128, sampler=DistributedSampler(test_set, shuffle=False))
    net = ConvNet().to(device)
    model, criterion = DDP(net), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(1, epochs + 1):
        train_sampler.set_epoch(epoch)
        start, total, right = time.perf_counter(), 0, []
        net.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss = criterion(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += loss.item()
        seconds = time.perf_counter() - start
        net.eval()
        for images, labels in test_loader:
            with torch.no_grad():
                right.append(all_gather(net(images.to(device)).argmax(1) == labels.to(device)))
        accuracy = torch.cat(right, 1).double().mean().item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}/{epochs}  loss {total / len(train_loader):.4f}  "
                  f"accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{train_sampler.total_size / seconds:.0f} images/s", flush=True)
        if accuracy >= 0.99:
            break


if __name__ == "__main__":
    train(int(sys.argv[1]), "--amp" in sys.argv)
    dist.destroy_process_group()
