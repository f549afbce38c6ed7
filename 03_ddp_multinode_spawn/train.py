"""Train a ConvNet on MNIST with DistributedDataParallel, in processes spawned on several nodes.

Node 0 has 8 GPUs and the address 10.0.0.1, node 1 has 2 GPUs:

    python 03_ddp_multinode_spawn/train.py -n 2 -g 8,2 -i 0 --master-addr 10.0.0.1
    python 03_ddp_multinode_spawn/train.py -n 2 -g 8,2 -i 1 --master-addr 10.0.0.1

As a demonstration, two nodes on this machine:

    bash 03_ddp_multinode_spawn/run.sh
"""

import argparse
import gc  # DDP-1
import math
import os
import signal  # DDP-0
import sys
import time
from datetime import timedelta  # DDP-1
from pathlib import Path

import torch
import torch.distributed as dist  # DDP-1
import torch.distributed.nn  # DDP-1: here, as a later import by DDP keeps the group alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # DDP-2
from torch.utils.data import DataLoader, DistributedSampler  # DDP-3
from tqdm import tqdm

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # a common/ next to this file wins
from common.data import already_batched, load_mnist
from common.gather import gather_in_order  # DDP-5
from common.model import ConvNet

EVAL_BATCH_SIZE = 250  # images; the accuracy does not depend on it


def parse_args():
    parser = argparse.ArgumentParser(
        usage="%(prog)s [options]", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=positive_int, default=1, help="passes over the training set")
    add("--batch-size", type=positive_int, default=64, help="images per process")
    add("--lr", type=positive_float, default=0.6, help="peak learning rate for 256 images per step")
    add("--seed", type=int, default=0, help="random seed for initialisation and shuffling")
    add("--data-dir", type=Path, default="data", help="MNIST directory; downloaded if missing")
    add("--output", type=writable_file, default="mnist.pt", help="path of the trained weights")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if available")
    add("--amp", action="store_true", help="mixed precision: autocast to bfloat16")
    add("--compile", action="store_true", help="compile the model: slower start, faster steps")
    add("--timeout", type=positive_int, default=300, help="collective timeout in seconds")  # DDP-1
    add("--sync-bn", action="store_true", help="BatchNorm over all GPUs")  # DDP-2
    env = os.environ  # DDP-0
    add("-n", "--nodes", type=positive_int, default=1, help="number of machines")
    add("-g", "--gpus", type=process_counts, default="all", help="processes per node: 8 or 8,2")
    add("-i", "--node-rank", type=int, default=env.get("NODE_RANK", 0), help="this node: 0, 1, ...")
    add("--master-addr", default=env.get("MASTER_ADDR", "127.0.0.1"), help="address of node 0")
    add("--master-port", type=int, default=env.get("MASTER_PORT", 29500), help="free port there")
    add("--start-timeout", type=positive_int, default=300, help="seconds to wait for all nodes")
    add("--check", action="store_true", help="check the options and exit")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if len(args.gpus) == 1:  # DDP-0: the same number on every node
        args.gpus *= args.nodes
    if len(args.gpus) != args.nodes:
        parser.error(f"--gpus: name one number of processes, or one for each of {args.nodes} nodes")
    if args.node_rank not in range(args.nodes):
        parser.error(f"--node-rank must be from 0 to {args.nodes - 1}, not {args.node_rank}")
    gpus = torch.cuda.device_count()
    if args.device == "cuda" and gpus < args.gpus[args.node_rank]:  # DDP-0
        parser.error(f"--device cuda needs a GPU per process, and PyTorch finds {gpus}")
    if args.device == "cpu" and args.sync_bn:  # DDP-2
        parser.error("--sync-bn needs GPUs")
    if args.check:
        parser.exit()
    return args


def train(local_rank, args):  # DDP-0
    # 1. Setup
    use_cuda = args.device == "cuda"
    if use_cuda:  # DDP-1
        torch.cuda.set_device(local_rank)  # one device per process, set before init_process_group
    timeout = timedelta(seconds=args.timeout)
    store = dist.TCPStore(args.master_addr, args.master_port, timeout=timeout)
    dist.init_process_group("nccl" if use_cuda else "gloo", timeout=timeout, store=store,
                            rank=sum(args.gpus[: args.node_rank]) + local_rank,
                            world_size=sum(args.gpus))
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    device = torch.device(args.device)
    torch.manual_seed(args.seed)

    # 2. Data
    train_set, test_set = load_mnist(args.data_dir)
    train_sampler = DistributedSampler(train_set, seed=args.seed)  # DDP-3: one shard per rank
    test_sampler = DistributedSampler(test_set, shuffle=False)
    images_per_epoch = train_sampler.total_size
    loader_options = {"collate_fn": already_batched, "pin_memory": use_cuda}
    train_loader = DataLoader(train_set, args.batch_size, sampler=train_sampler, **loader_options)
    test_loader = DataLoader(test_set, EVAL_BATCH_SIZE, sampler=test_sampler, **loader_options)

    # 3. Model
    net = ConvNet().to(device, memory_format=torch.channels_last)
    if args.sync_bn:  # DDP-2
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    model = DDP(net, device_ids=[local_rank] if use_cuda else None, gradient_as_bucket_view=True)
    model.broadcast_buffers = False  # evaluate() broadcasts them
    torch.manual_seed(args.seed + rank)  # different dropout per rank
    if args.compile:
        model = torch.compile(model)

    # 4. Loss and optimizer
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    global_batch = args.batch_size * world_size  # DDP-3
    peak_lr = args.lr * math.sqrt(global_batch / 256)
    optimizer = torch.optim.SGD(model.parameters(), peak_lr, momentum=0.9, nesterov=True)
    total_steps = args.epochs * len(train_loader)

    # 5. Train and evaluate
    steps_done = 0
    for epoch in range(1, args.epochs + 1):
        train_sampler.set_epoch(epoch)  # DDP-3: reshuffle
        title = f"epoch {epoch}/{args.epochs}"
        start = time.perf_counter()
        total_loss = torch.zeros((), dtype=torch.float64, device=device)
        disable = None if rank == 0 else True  # DDP-4: one progress bar
        progress = tqdm(train_loader, title, leave=False, disable=disable)
        for step, (images, labels) in enumerate(progress):
            images = images.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16, enabled=args.amp):
                loss = criterion(model(images), labels)
            loss.backward()
            total_loss += loss.detach() * len(labels)
            nn.utils.clip_grad_norm_(model.parameters(), 0.7)  # stabilises the warm-up
            for group in optimizer.param_groups:
                group["lr"] = peak_lr * warmup_then_decay(steps_done, total_steps)
            optimizer.step()
            optimizer.zero_grad()
            steps_done += 1
            if step % 50 == 0:
                progress.set_postfix(loss=f"{loss.item():.4f}")
        dist.all_reduce(total_loss)  # DDP-5: sum over all ranks
        mean_loss = total_loss.item() / images_per_epoch
        seconds = time.perf_counter() - start
        accuracy = evaluate(net, test_loader, device)
        speed = images_per_epoch / seconds
        if rank == 0:  # DDP-4: log on rank 0 only
            print(f"{title}  loss {mean_loss:.4f}  accuracy {accuracy:.4f}  {seconds:.1f} s  "
                  f"{speed:.0f} images/s", flush=True)

    # 6. Save
    if rank == 0:  # DDP-4: save on rank 0 only
        weights = {name: tensor.cpu() for name, tensor in net.state_dict().items()}
        torch.save(weights, args.output)


@torch.inference_mode()
def evaluate(model, test_loader, device):
    """Return the fraction of the test set that the model classifies correctly."""
    for buffer in model.buffers():  # DDP-5: copy rank 0's to all ranks
        dist.broadcast(buffer, src=0)
    model.eval()
    correct = []
    for images, labels in test_loader:
        predictions = model(images.to(device)).argmax(1)
        correct.append(predictions == labels.to(device))
    correct = torch.cat(correct)
    correct = gather_in_order(correct, len(test_loader.dataset))  # DDP-5: from all ranks
    model.train()
    return correct.sum().item() / len(correct)


def warmup_then_decay(step, total_steps):
    """The factor of the peak learning rate: rises over 40 % of the steps, then falls to 0."""
    return min((step + 1) / (0.4 * total_steps + 1), (total_steps - step) / (0.6 * total_steps))


def positive_int(text):
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return number


def process_counts(text):  # DDP-0
    """The processes per node: [8, 2] for "8,2"; "all" is one per GPU, or two without GPUs."""
    if text == "all":
        return [torch.cuda.device_count() or 2]
    return [positive_int(count) for count in text.split(",")]


def positive_float(text):
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return number


def writable_file(text):
    path = Path(text)
    target = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(target, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {path}; name a file in a writable folder")
    return path


def run(local_rank, args):  # DDP-0: what each spawned process runs
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Linux sends it when the parent process dies
    if not torch.multiprocessing.parent_process().is_alive():  # it died before that
        sys.exit(1)
    os.environ["LOCAL_RANK"] = str(local_rank)  # load_mnist downloads on local rank 0
    train(local_rank, args)
    gc.collect()  # DDP-1: free the model before destroying the group, or the exit may abort
    dist.destroy_process_group()


def connect_nodes(args):  # DDP-1
    """Wait for all nodes at node 0's store; return the store, which must stay open during the job.

    Raises SystemExit after --start-timeout, or if the nodes have different --gpus.
    """
    timeout = timedelta(seconds=args.start_timeout)
    address, port = args.master_addr, args.master_port
    is_master = args.node_rank == 0
    nodes = range(args.nodes)
    try:
        store = dist.TCPStore(address, port, is_master=is_master, timeout=timeout)
        store.set(f"gpus of node {args.node_rank}", str(args.gpus))
        gpus = [store.get(f"gpus of node {node}").decode() for node in nodes]
        store.set(f"node {args.node_rank} is ready", "")
        if is_master:
            store.wait([f"node {node} is ready" for node in nodes])
    except dist.DistError as error:
        reason = str(error).splitlines()[0]
        sys.exit(f"error: node {args.node_rank} of {args.nodes} cannot connect to all nodes at "
                 f"{address}:{port} ({reason}): is that address right, the port open "
                 f"(nc -zv {address} {port}), every --node-rank started?")
    if len(set(gpus)) > 1:
        sys.exit(f"error: the nodes have different --gpus: {', '.join(gpus)}")
    return store


def main():
    args = parse_args()  # DDP-0: share the cores, connect the nodes, start the processes
    nprocs = args.gpus[args.node_rank]
    threads = max(1, torch.get_num_threads() // nprocs)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    _store = connect_nodes(args)  # node 0's store stays open while the processes use it
    torch.multiprocessing.spawn(run, (args,), nprocs)


if __name__ == "__main__":
    main()
