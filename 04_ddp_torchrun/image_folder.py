"""Train ResNet-18 on folders of images with DDP, from random or pretrained weights.

torchrun --standalone --nproc-per-node=2 04_ddp_torchrun/image_folder.py --data-dir DIR
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import transforms
from torchvision.datasets import ImageFolder
from torchvision.models import ResNet18_Weights, resnet18
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the folder of common/
from common.checks import check_equal, check_same_model
from common.gather import gather_in_order
from common.model import warmup_then_decay

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels


def parse_args():
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    gpu = torch.cuda.is_available()
    add("--epochs", type=int, default=1, help="default: %(default)s")
    add("--batch-size", type=int, default=64, help="images per process: %(default)s")
    add("--lr", type=float, default=1e-3, help="peak rate for 256 images: %(default)s")
    add("--seed", type=int, default=0)
    add("--workers", type=int, default=4, help="per process: %(default)s")
    add("--data-dir", type=Path, required=True, help="has train/CLASS and val/CLASS")
    add("--size", type=int, default=224, help="pixels: %(default)s")
    add("--weights", help="file, or DEFAULT: ImageNet's; without last layer")
    add("--output", type=Path, default="resnet18.pt", help="weights: %(default)s")
    add("--device", choices=["cuda", "cpu"], default="cuda" if gpu else "cpu")
    add("--amp", action="store_true", help="mixed precision: bfloat16")
    add("--compile", action="store_true", help="compile: slow start, faster steps")
    add("--sync-bn", action="store_true", help="BatchNorm over all GPUs")
    return parser.parse_args()


@record  # DDP-1: torchrun's last lines show the first error
def train(args):
    # 1. Setup
    # DDP-1: torchrun sets LOCAL_RANK, the number of the process on its machine
    local_rank = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    check_equal(**vars(args))  # DDP-1: an error if a machine has different options
    torch.manual_seed(args.seed)
    args.output.parent.mkdir(parents=True, exist_ok=True)

    # 2. Data
    to_tensor = [transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    augment = [
        transforms.RandomResizedCrop(args.size),
        transforms.RandomHorizontalFlip(),
    ]
    resize = [transforms.Resize(args.size * 8 // 7), transforms.CenterCrop(args.size)]
    train_set, test_set = [
        ImageFolder(args.data_dir / part, transforms.Compose([*steps, *to_tensor]))
        for part, steps in (("train", augment), ("val", resize))
    ]
    classes = train_set.classes
    if test_set.classes != classes:  # their numbers would be others
        raise ValueError(f"train has the classes {classes}, val {test_set.classes}")
    # DDP-3: each rank reads its own shard; an error if a machine has other files
    check_equal(classes=classes, images=(len(train_set), len(test_set)))
    sampler = DistributedSampler(train_set, seed=args.seed)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    options = {"num_workers": args.workers, "pin_memory": args.device == "cuda"}
    train_loader = DataLoader(train_set, args.batch_size, sampler=sampler, **options)
    test_loader = DataLoader(test_set, args.batch_size, sampler=test_sampler, **options)

    # 3. Model
    model = resnet18(num_classes=len(classes))
    # DDP-2: only rank 0 reads weights, and DDP(...) gives them to the others
    if args.weights and rank == 0:
        if args.weights == "DEFAULT":
            weights = ResNet18_Weights.DEFAULT.get_state_dict(check_hash=True)
        else:
            weights = torch.load(args.weights, map_location="cpu", weights_only=True)
        # the last layer is new; with strict=False wrong names would be no error
        weights["fc.weight"], weights["fc.bias"] = model.fc.parameters()
        model.load_state_dict(weights)
    model.to(device)
    if args.sync_bn:  # DDP-2: convert BatchNorm before the model is wrapped
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    ddp_model = DDP(model)  # DDP-2: all ranks get the weights of rank 0
    if args.compile:
        ddp_model = torch.compile(ddp_model)
    torch.manual_seed(args.seed + rank)  # DDP-3: for dropout, differs between ranks

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * world_size  # DDP-3: images of all ranks per step
    # square-root scaling of the learning rate, for Adam: arXiv:2205.10287
    lr = args.lr * (global_batch / 256) ** 0.5
    *rest, weight, bias = model.parameters()
    # pretrained layers need a smaller rate than the new one
    rest_lr = lr / 10 if args.weights else lr
    groups = [{"params": [weight, bias]}, {"params": rest, "lr": rest_lr}]
    optimizer = torch.optim.AdamW(groups, lr)
    steps = args.epochs * len(train_loader)
    # taken in the middle of a step, so that no step has a rate of 0
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: warmup_then_decay((step + 0.5) / steps)
    )

    # 5. Train and evaluate
    for epoch in range(1, args.epochs + 1):
        sampler.set_epoch(epoch)  # DDP-3: shuffle again
        model.train()
        start = time.perf_counter()
        # the sum of the losses, and the number of images
        total = torch.zeros(2, dtype=torch.float64, device=device)
        # DDP-4: hide the progress bar on other ranks (True) and in files (None)
        hide = rank > 0 or None
        for batch in tqdm(train_loader, f"epoch {epoch}", leave=False, disable=hide):
            images, labels = [part.to(device, non_blocking=True) for part in batch]
            optimizer.zero_grad()
            with torch.autocast(args.device, torch.bfloat16, enabled=args.amp):
                loss = criterion(ddp_model(images), labels)
            loss.backward()  # DDP-2: averages the gradients of all ranks
            optimizer.step()
            scheduler.step()
            total[0] += loss.detach() * len(labels)
            total[1] += len(labels)
        # DDP-2: an error if a weight is NaN or differs between the ranks
        check_same_model(model)
        dist.all_reduce(total)  # DDP-5: the sum over all ranks
        loss = (total[0] / total[1]).item()  # waits for the GPU
        seconds = time.perf_counter() - start
        accuracy = evaluate(model, test_loader, len(test_set), device)
        if rank == 0:  # DDP-4: log on rank 0 only
            print(
                f"epoch {epoch}/{args.epochs}  loss {loss:.4f}  accuracy {accuracy:.4f}"
                f"  {seconds:.1f} s  {total[1] / seconds:.0f} images/s",
                flush=True,
            )

    # 6. Save
    if rank == 0:  # DDP-4: save on rank 0 only
        torch.save(model.state_dict(), args.output)


@torch.no_grad()
def evaluate(model, batches, length, device):
    """Return the fraction of the test set that the model classifies correctly."""
    for buffer in model.buffers():  # DDP-5: all ranks take rank 0's (BatchNorm)
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = []
    for batch in batches:
        images, labels = [part.to(device, non_blocking=True) for part in batch]
        correct.append(model(images).argmax(1) == labels)
    # DDP-5: collect the results of all ranks
    correct = gather_in_order(torch.cat(correct), length)
    return correct.sum().item() / length


if __name__ == "__main__":
    train(parse_args())
    dist.destroy_process_group()  # DDP-1: after train() has released the model
