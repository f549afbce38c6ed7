"""A plain DDP recipe on MNIST, which benchmark.md compares with 04.

    torchrun --standalone --nproc-per-node=2 tests/copies/recipe.py 15 [--amp]

It reads single samples through a default DataLoader, keeps contiguous tensors, uses
Adam at 1e-3, gathers every batch at evaluation, and ends at an accuracy of 99 % or
after so many epochs.
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

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the folder of common/
from common.gather import all_gather
from common.model import ConvNet


def train(epochs, amp):
    local_rank = int(os.environ["LOCAL_RANK"])
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set = MNIST("data", True, ToTensor())
    test_set = MNIST("data", False, ToTensor())
    train_sampler = DistributedSampler(train_set)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    train_loader = DataLoader(train_set, 128, sampler=train_sampler)
    test_loader = DataLoader(test_set, 128, sampler=test_sampler)
    model = ConvNet().to(device)
    ddp_model = DDP(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(1, epochs + 1):
        train_sampler.set_epoch(epoch)
        start = time.perf_counter()
        total = 0
        model.train()
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=amp):
                loss = criterion(ddp_model(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
        seconds = time.perf_counter() - start
        model.eval()
        right = []
        for images, labels in test_loader:
            images, labels = images.to(device), labels.to(device)
            with torch.no_grad():
                right.append(all_gather(model(images).argmax(1) == labels))
        accuracy = torch.cat(right, 1).double().mean().item()
        if dist.get_rank() == 0:
            print(
                f"epoch {epoch}/{epochs}  loss {total / len(train_loader):.4f}  "
                f"accuracy {accuracy:.4f}  {seconds:.1f} s  "
                f"{train_sampler.total_size / seconds:.0f} images/s",
                flush=True,
            )
        if accuracy >= 0.99:
            break


if __name__ == "__main__":
    train(int(sys.argv[1]), "--amp" in sys.argv)
    dist.destroy_process_group()
