"""common/: the network, the data and the gather helpers."""

import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import mnist_mirror
import pytest
import torch
import torch.distributed as dist
from helpers import DIGITS, RANKS, ROOT, load_script
from torch.utils.data import DataLoader, DistributedSampler

import common.data
from common.data import already_batched, load_mnist
from common.gather import all_gather, all_gather_ragged, gather_in_order
from common.model import ConvNet


def in_processes(function, count, *arguments):
    """Call function(rank, ...) in processes forked from one that has imported torch."""
    ranks = [RANKS.Process(target=function, args=(rank, *arguments)) for rank in range(count)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=200)
    for process in ranks:
        process.kill()
        process.join()
    assert [process.exitcode for process in ranks] == [0] * count


def test_convnet_is_the_network_of_the_tutorials():
    model = ConvNet()
    assert {name.partition(".")[0] for name in model.state_dict()} == {"layer1", "layer2", "fc"}
    for layer in (model.layer1, model.layer2):
        kinds = [type(part).__name__ for part in layer]
        assert kinds == ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"]
    convolutions = (5 * 5 * 1 + 1) * 16 + (5 * 5 * 16 + 1) * 32
    norms, linear = 2 * 16 + 2 * 32, (7 * 7 * 32 + 1) * 10
    parameters = sum(weight.numel() for weight in model.parameters())
    assert parameters == convolutions + norms + linear == 29_034
    assert model(torch.rand(5, 1, 28, 28)).shape == (5, 10)


class TestDigits:
    train_set, test_set = load_mnist(DIGITS)

    def test_shapes_and_ranges(self):
        for part, count in ((self.train_set, 1438 * 9), (self.test_set, 359)):
            images, labels = part.__getitems__(list(range(len(part))))
            assert images.shape == (count, 1, 28, 28) and images.dtype == torch.float32
            assert images.min() == 0 and 0.9 < images.max() <= 1
            assert labels.shape == (count,) and labels.dtype == torch.int64
            assert labels.bincount(minlength=10).min() >= 0.09 * count

    def test_no_test_image_is_in_the_training_set(self):
        train = {image.numpy().tobytes() for image in self.train_set.tensors[0]}
        assert not any(image.numpy().tobytes() in train for image in self.test_set.tensors[0])

    def test_a_batch_is_the_images_of_its_indices(self):
        loader = DataLoader(self.test_set, 3, sampler=[7, 3, 358], collate_fn=already_batched)
        ((images, labels),) = loader
        for row, index in enumerate((7, 3, 358)):
            image, label = self.test_set[index]
            torch.testing.assert_close(images[row], image)
            assert labels[row] == label


@pytest.fixture
def files(tmp_path):
    mnist_mirror.make_files(tmp_path / "files")
    return tmp_path / "files"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "the data"


def test_mnist_is_downloaded_and_loaded(files, root, monkeypatch, capsys):
    with mnist_mirror.serve(files) as (url, _):
        mnist_mirror.use_files(monkeypatch, files, url)
        train_set, test_set = load_mnist(root)
    load_mnist(root)  # without the server
    assert (len(train_set), len(test_set)) == (100, 23)
    pixels = (files / "t10k-images-idx3-ubyte").read_bytes()[16:]
    images, labels = test_set.__getitems__(list(range(23)))
    torch.testing.assert_close(images, torch.tensor(list(pixels)).view(23, 1, 28, 28) / 255)
    assert labels.tolist() == [index % 10 for index in range(23)]
    assert [path.name for path in root.iterdir()] == ["MNIST"]
    raw = sorted(path.name for path in (root / "MNIST/raw").iterdir())
    assert raw == sorted(common.data.CRC32)
    assert capsys.readouterr().out == ""


def load_once(rank, files, root, url):
    mnist_mirror.use_files(pytest.MonkeyPatch(), files, url)
    assert len(load_mnist(root)[0]) == 100


def test_processes_that_start_together_download_once(files, root):
    with mnist_mirror.serve(files) as (url, requested):
        in_processes(load_once, 4, files, root, url)
    one_download = 2  # torchvision asks for redirections first, and then for the file
    assert requested.count("/t10k-labels-idx1-ubyte.gz") == one_download


@pytest.mark.parametrize("damage", ["truncated", "one byte", "empty"])
def test_a_damaged_file_is_named(damage, files, root, monkeypatch):
    mnist_mirror.use_files(monkeypatch, files, "http://127.0.0.1:9/")
    raw = root / "MNIST/raw"
    raw.mkdir(parents=True)
    for name in common.data.CRC32:
        (raw / name).write_bytes((files / name).read_bytes())
    content = bytearray((raw / name).read_bytes())
    changed = content[:-1] + bytes([content[-1] ^ 1])
    damaged = {"truncated": content[:-1], "one byte": changed, "empty": b""}[damage]
    (raw / name).write_bytes(damaged)
    with pytest.raises(SystemExit) as stop:
        load_mnist(root)
    how = "delete it and run again, or copy it again"
    assert stop.value.code == f"error: {raw / name} is damaged: {how}"


def check_fallback(root, capsys, url):
    train_set, test_set = load_mnist(root)
    assert (len(train_set), len(test_set)) == (1438 * 9, 359)
    (line,) = capsys.readouterr().out.splitlines()
    assert url in line and "training on the 1,797 bundled digits" in line
    assert f"to {root / 'MNIST/raw'}." in line


def test_without_a_network_it_trains_on_the_digits(root, monkeypatch, capsys):
    url = "http://127.0.0.1:9/"  # refuses
    monkeypatch.setattr(common.data.torchvision_mnist(), "mirrors", [url])
    check_fallback(root, capsys, url)
    assert not root.exists()


def test_a_login_page_in_place_of_a_file_is_not_kept(files, root, monkeypatch, capsys):
    (files / "t10k-labels-idx1-ubyte.gz").write_bytes(b"<html>please log in</html>")
    with mnist_mirror.serve(files) as (url, _):
        monkeypatch.setattr(common.data.torchvision_mnist(), "mirrors", [url])
        check_fallback(root, capsys, url)
    assert list((root / "MNIST/raw").iterdir()) == []


def load_slowly(rank, folder):
    """Rank 0 prepares the data for longer than the collective timeout, while rank 1 waits."""
    store = dist.FileStore(f"{folder}/store", 2)
    timeout = timedelta(seconds=2)
    dist.init_process_group("gloo", timeout=timeout, store=store, rank=rank, world_size=2)
    prepare = common.data.prepare_mnist

    def slow_prepare(root):
        time.sleep(4)
        return prepare(root)

    common.data.prepare_mnist = slow_prepare
    pytest.MonkeyPatch().setenv("LOCAL_RANK", str(rank))
    assert len(load_mnist(DIGITS)[1]) == 359
    dist.destroy_process_group()


def test_a_slow_download_does_not_end_the_ranks_that_wait(tmp_path):
    in_processes(load_slowly, 2, tmp_path)


def load_different_data(rank, folder, roots):
    """Load from another folder on each of two nodes."""
    dist.init_process_group("gloo", f"file://{folder}/store", None, 2, rank)
    pytest.MonkeyPatch().setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit) as stop:
        load_mnist(roots[rank])
    assert not dist.is_initialized()
    Path(folder, f"exit-{rank}").write_text(str(stop.value.code))


def test_nodes_with_different_data_end_with_one_line(tmp_path):
    raw = tmp_path / "damaged/MNIST/raw"
    raw.mkdir(parents=True)
    for name in common.data.CRC32:
        (raw / name).write_bytes(b"not what it should be")
    in_processes(load_different_data, 2, tmp_path, (DIGITS, tmp_path / "damaged"))
    host = socket.gethostname()
    found = f"a damaged MNIST on {host}, the bundled digits on {host}"
    line = f"error: the nodes have different data ({found}): copy MNIST to {DIGITS} on every node"
    assert [(tmp_path / f"exit-{rank}").read_text() for rank in (0, 1)] == [line, "1"]


def gather_and_evaluate(rank, folder, weights):
    """Gather and evaluate in groups of 1, 2, 3 and 7 of the processes."""
    torch.set_num_threads(1)
    script = load_script(ROOT / "04_ddp_torchrun/train.py")
    for size in (1, 2, 3, 7):
        if rank < size:
            dist.init_process_group("gloo", f"file://{folder}/{size}", None, size, rank)
            check_gather(rank, size)
            accuracy = evaluate(script, weights, rank)
            Path(folder, f"accuracy-{size}-{rank}").write_text(repr(accuracy))
            dist.destroy_process_group()


def check_gather(rank, size):
    mine = torch.tensor([[rank, 10 * rank]])
    assert torch.equal(all_gather(mine), torch.tensor([[[r, 10 * r]] for r in range(size)]))
    strided = torch.arange(6).view(2, 3).t()[rank % 3]  # not contiguous
    last = torch.tensor([[0, 3], [1, 4], [2, 5]])[(size - 1) % 3]
    assert torch.equal(all_gather(strided)[-1], last)
    for length in (lambda r: r, lambda r: 3 * (r == 1), lambda r: 0):
        parts = all_gather_ragged(torch.full((length(rank), 2), float(rank)))
        assert [part.shape for part in parts] == [(length(r), 2) for r in range(size)]
        assert all((part == r).all() for r, part in enumerate(parts))
    for length in (1, 5, 6, 7, 20):
        indices = torch.tensor(list(DistributedSampler(range(length), shuffle=False)))
        assert torch.equal(gather_in_order(indices, length), torch.arange(length))
        rows = gather_in_order(indices[:, None] > 3, length)
        assert torch.equal(rows, torch.arange(length)[:, None] > 3)


def evaluate(script, weights, rank):
    model = ConvNet()
    model.load_state_dict(torch.load(weights, weights_only=True))
    if rank:  # as after a step: only rank 0 has the statistics that are saved
        for buffer in model.buffers():
            buffer.add_(rank)
    test_set = load_mnist(DIGITS)[1]
    sampler = DistributedSampler(test_set, shuffle=False)
    test_loader = DataLoader(test_set, 100, sampler=sampler, collate_fn=already_batched)
    accuracy = script.evaluate(model, test_loader, torch.device("cpu"))
    assert model.training
    return accuracy


def test_gather_and_exact_evaluation_on_1_2_3_and_7_processes(tmp_path):
    torch.manual_seed(0)
    model, test_set = ConvNet(), load_mnist(DIGITS)[1]
    images, labels = test_set.__getitems__(list(range(len(test_set))))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(25):  # enough to be often right and often wrong
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images[:100]), labels[:100]).backward()
        optimizer.step()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    model.eval()
    right = sum(int(model(image[None]).argmax()) == int(label) for image, label in test_set)
    assert 180 < right < 359
    in_processes(gather_and_evaluate, 7, str(tmp_path), tmp_path / "weights.pt")
    seen = {path.name: float(path.read_text()) for path in tmp_path.glob("accuracy-*")}
    sizes = (1, 2, 3, 7)
    assert seen == {f"accuracy-{n}-{rank}": right / 359 for n in sizes for rank in range(n)}


@pytest.mark.slow
def test_torchvision_imports_whatever_build_of_torch_there_is():
    code = "import common.data as data; mnist = data.torchvision_mnist();"
    code += "import torchvision; print(mnist is torchvision.datasets.MNIST)"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (answer.stdout, answer.stderr) == ("True\n", "")
