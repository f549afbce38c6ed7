"""common/: the network, the data and the gather helpers."""

import functools
import gzip
import hashlib
import http.server
import shutil
import socket
import struct
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from helpers.checks import bare_accuracy
from helpers.paths import DIGITS, ROOT
from helpers.ranks import exit_codes, start
from helpers.scripts import declare_torchvision_operators, load_script
from torch.utils.data import DataLoader, DistributedSampler

from common import data
from common.data import load_mnist
from common.gather import all_gather, all_gather_ragged, gather_in_order
from common.model import ConvNet

DIGIT_SETS = load_mnist(DIGITS)
REFUSES = "http://127.0.0.1:9/"


def in_processes(function, count, *arguments):
    """Call function(rank, ...) in processes."""
    ranks = start(function, [(rank, *arguments) for rank in range(count)])
    assert exit_codes(ranks) == [0] * count


@pytest.fixture
def files(tmp_path):
    """A folder with MNIST's four files, plain and compressed: 100 training and 23 test images."""
    (tmp_path / "files").mkdir()
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 100), ("t10k", 23)):
        pixels = torch.randint(0, 256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        images = struct.pack(">IIII", 2051, count, 28, 28) + pixels.numpy().tobytes()
        labels = struct.pack(">II", 2049, count) + bytes(index % 10 for index in range(count))
        for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
            path = tmp_path / f"files/{part}-{kind}-ubyte"
            path.write_bytes(content)
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(content))
    return tmp_path / "files"


@pytest.fixture
def url(files):
    """A server that stands in for MNIST's host."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=files)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def use_files(monkeypatch, folder, url=REFUSES):
    """Let common.data and torchvision take the files of a folder for MNIST, from this host."""
    monkeypatch.setattr(data, "BYTES", {name: len((folder / name).read_bytes())
                                        for name in data.BYTES})
    files = [folder / f"{name}.gz" for name in data.BYTES]
    compressed = [(file.name, hashlib.md5(file.read_bytes()).hexdigest()) for file in files]
    declare_torchvision_operators()
    monkeypatch.setattr("torchvision.datasets.MNIST.resources", compressed)
    monkeypatch.setattr("torchvision.datasets.MNIST.mirrors", [url])


def test_mnist_is_downloaded_and_loaded(files, url, tmp_path, monkeypatch, capsys):
    """Also where a file is there, but incomplete."""
    root = tmp_path / "the data"
    shutil.copytree(files, root / "MNIST/raw", ignore=shutil.ignore_patterns("*.gz"))
    incomplete = root / "MNIST/raw/t10k-labels-idx1-ubyte"
    incomplete.write_bytes(b"1234")
    reader = incomplete.open("rb")
    use_files(monkeypatch, files, url)
    load_mnist(root)
    assert reader.read() == b"1234"  # it was replaced, not overwritten
    monkeypatch.setitem(sys.modules, "torchvision.datasets", None)  # only the download needs it
    train_set, test_set = load_mnist(root)
    assert (len(train_set), len(test_set)) == (100, 23)
    names = ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte")
    pixels = [torch.tensor(list((files / name).read_bytes()[16:])) for name in names]
    torch.testing.assert_close(train_set.tensors[0].flatten(), pixels[0] / 255)
    expected = pixels[1].view(23, 1, 28, 28) / 255
    ((images, labels),) = DataLoader(test_set, 3, sampler=[7, 3, 22])
    torch.testing.assert_close(images, expected[[7, 3, 22]])
    assert labels.tolist() == [7, 3, 2] and labels.dtype == torch.int64
    assert [path.name for path in root.iterdir()] == ["MNIST"]
    assert "digits" not in capsys.readouterr().out


def load_once(rank, files, root, url):
    use_files(pytest.MonkeyPatch(), files, url)
    assert len(load_mnist(root)[0]) == 100


def test_processes_that_start_together_all_get_mnist(files, url, tmp_path):
    """Several jobs, or nodes that share a disk: none of them may read an incomplete file."""
    in_processes(load_once, 4, files, tmp_path / "the data", url)


def check_fallback(sets, output, root):
    """The digits, and one line on why."""
    assert [len(part) for part in sets] == [1438 * 9, 359]
    (line,) = [line for line in output.splitlines() if "digits" in line]
    assert line.startswith(f"MNIST is not in {root} on {socket.gethostname()}, and the download ")
    assert line.endswith(": training on the 1,797 bundled digits") and "(RuntimeError(" in line


def test_without_a_network_it_trains_on_the_digits(files, tmp_path, monkeypatch, capsys):
    use_files(monkeypatch, files)
    check_fallback(load_mnist(tmp_path), capsys.readouterr().out, tmp_path)
    train, test = ({image.numpy().tobytes() for image in part.tensors[0]} for part in DIGIT_SETS)
    assert len(train) > 10_000 and not test & train  # no test image is in the training set


def load_on_two_nodes(rank, files, roots):
    """Two nodes, of which only the second has no MNIST."""
    patch, printed = pytest.MonkeyPatch(), []
    use_files(patch, files)
    patch.setenv("LOCAL_RANK", "0")
    patch.setattr("builtins.print", lambda line, **kwargs: printed.append(line))
    dist.init_process_group("gloo", f"file://{files}/store", None, 2, rank)
    sets = load_mnist(roots[rank])
    dist.destroy_process_group()
    if rank == 0:
        check_fallback(sets, "\n".join(printed), roots[1])
    assert len(sets[1]) == 359 and len(printed) == (rank == 0)


def test_when_one_node_has_no_mnist_all_ranks_train_on_the_digits(files, tmp_path):
    shutil.copytree(files, tmp_path / "MNIST/raw")
    in_processes(load_on_two_nodes, 2, files, (tmp_path, tmp_path / "elsewhere"))


def gather_and_evaluate(rank, folder, weights, expected):
    """Gather and evaluate in groups of 1, 2, 3 and 7 of the processes."""
    torch.set_num_threads(1)
    script = load_script(ROOT / "04_ddp_torchrun/train.py")
    pytest.MonkeyPatch().setattr(dist, "all_gather", as_nccl_does)
    for size in (1, 2, 3, 7):
        if rank < size:
            dist.init_process_group("gloo", f"file://{folder}/{size}", None, size, rank)
            check_gather(rank, size)
            assert evaluate(script, weights, rank) == expected
            dist.destroy_process_group()


def as_nccl_does(parts, tensor, gather=dist.all_gather):
    """Gloo would gather tensors in any order of memory."""
    assert all(each.is_contiguous() for each in (*parts, tensor))
    gather(parts, tensor)


def check_gather(rank, size):
    mine = torch.tensor([[rank, 10 * rank]])
    assert torch.equal(all_gather(mine), torch.tensor([[[r, 10 * r]] for r in range(size)]))
    columns = torch.arange(2 * size).view(2, size).t()  # not contiguous
    assert torch.equal(all_gather(columns[rank]), columns)
    image = torch.arange(24).view(1, 2, 3, 4).to(memory_format=torch.channels_last)
    assert torch.equal(all_gather(image + rank), torch.stack([image + r for r in range(size)]))
    for length in (lambda r: r, lambda r: 3 * (r == 1), lambda r: 0):
        parts = all_gather_ragged(torch.full((length(rank), 2), rank))
        assert [part.tolist() for part in parts] == [[[r, r]] * length(r) for r in range(size)]
    for length in (1, 5, 6, 7, 20):
        indices = torch.tensor(list(DistributedSampler(range(length), shuffle=False)))
        rows = gather_in_order(torch.stack([indices, -indices], 1), length)
        assert torch.equal(rows, torch.stack([torch.arange(length), -torch.arange(length)], 1))
    if rank == 0:  # no other rank takes part
        for rows in (19 // size, 21):
            with pytest.raises(ValueError, match=f"rank 0 has {rows}: use all_gather_ragged"):
                gather_in_order(torch.zeros(rows), 20)


def evaluate(script, weights, rank):
    model = ConvNet()
    model.load_state_dict(torch.load(weights, weights_only=True))
    if rank:  # as after a step: only rank 0 has the statistics that are saved
        for buffer in model.buffers():
            buffer.add_(rank)
    sampler = DistributedSampler(DIGIT_SETS[1], shuffle=False)
    test_loader = DataLoader(DIGIT_SETS[1], 100, sampler=sampler)
    return script.evaluate(model, test_loader, torch.device("cpu"))


def test_gather_and_exact_evaluation_on_1_2_3_and_7_processes(tmp_path):
    torch.manual_seed(0)
    model, weights = ConvNet(), tmp_path / "weights.pt"
    images, labels = DIGIT_SETS[1][:100]
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(25):  # enough to be often right and often wrong
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    torch.save(model.state_dict(), weights)
    assert 0.5 < bare_accuracy(weights) < 1
    in_processes(gather_and_evaluate, 7, tmp_path, weights, bare_accuracy(weights))
