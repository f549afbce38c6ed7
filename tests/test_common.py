"""common/: the network, the data and the gather helpers."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import mnist_mirror
import pytest
import torch
import torch.distributed as dist
from helpers import DIGITS, ROOT, load_script, run_two_nodes
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import common.data
from common.data import load_mnist
from common.gather import all_gather, all_gather_ragged, gather_in_order
from common.model import ConvNet


def test_convnet_is_the_network_of_the_tutorials():
    model = ConvNet()
    assert {name.partition(".")[0] for name in model.state_dict()} == {"layer1", "layer2", "fc"}
    kinds = ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"]
    for layer, channels in ((model.layer1, (1, 16)), (model.layer2, (16, 32))):
        assert [type(part).__name__ for part in layer] == kinds
        assert (layer[0].in_channels, layer[0].out_channels) == channels
        assert (layer[0].kernel_size, layer[0].padding) == ((5, 5), (2, 2))
        assert layer[3].kernel_size == 2
    assert (model.fc.in_features, model.fc.out_features) == (7 * 7 * 32, 10)
    # weights and biases of the convolutions, of the norms and of the linear layer
    assert sum(weight.numel() for weight in model.parameters()) == 416 + 12832 + 32 + 64 + 15690
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

    def test_no_test_image_is_in_the_train_set(self):
        train = {bytes(image.flatten().tolist()) for image in self.train_set.tensors[0]}
        assert not any(bytes(image.flatten().tolist()) in train for image in self.test_set.tensors[0])

    def test_one_index_and_many_give_the_same(self):
        images, labels = self.test_set.__getitems__([7, 3, 358])
        for row, index in enumerate((7, 3, 358)):
            image, label = self.test_set[index]
            torch.testing.assert_close(images[row], image)
            assert labels[row] == label

    def test_the_file_is_small_and_holds_pixels_and_labels(self):
        rows = (ROOT / "common/digits.bin").read_bytes()
        assert len(rows) == 1797 * 65
        assert max(rows) == 16
        assert set(rows[64::65]) == set(range(10))

    def test_a_batch_is_one_call_and_any_other_data_set_fits(self):
        class Mine(Dataset):
            def __len__(self):
                return 10

            def __getitem__(self, index):
                return torch.full((1, 28, 28), float(index)), index

        calls = []
        part = self.test_set
        part.__class__ = type("Counted", (type(part),), {"__getitems__": lambda me, at: calls.append(at) or me.tensors})
        try:
            list(DataLoader(part, 100, sampler=DistributedSampler(part, 2, 0, shuffle=False), collate_fn=tuple))
        finally:
            part.__class__ = type(self.train_set)
        assert calls == [list(range(0, 200, 2)), [*range(200, 359, 2)]]
        images, labels = next(iter(DataLoader(Mine(), 4, sampler=DistributedSampler(Mine(), 2, 1, shuffle=False))))
        assert labels.tolist() == [1, 3, 5, 7] and images.shape == (4, 1, 28, 28)


@pytest.fixture
def files(tmp_path):
    mnist_mirror.make_files(tmp_path / "files")
    return tmp_path / "files"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "the data"


class TestMnist:
    def test_is_downloaded_once_and_loaded(self, files, root, monkeypatch, capsys):
        with mnist_mirror.serve(files) as (url, asked):
            mnist_mirror.use_files(monkeypatch, files, url)
            train_set, test_set = load_mnist(root)
            assert asked
            count = len(asked)
            load_mnist(root)
            assert len(asked) == count
        assert (len(train_set), len(test_set)) == (100, 23)
        pixels = (files / "t10k-images-idx3-ubyte").read_bytes()[16:]
        expected = torch.tensor(list(pixels)).view(23, 1, 28, 28) / 255
        images, labels = test_set.__getitems__(list(range(23)))
        torch.testing.assert_close(images, expected)
        assert labels.tolist() == [index % 10 for index in range(23)]
        assert sorted(path.name for path in root.iterdir()) == ["MNIST"]
        assert sorted(path.name for path in (root / "MNIST/raw").iterdir()) == sorted(common.data.CRC32)
        assert "bundled" not in capsys.readouterr().out

    def test_8_processes_at_once_on_an_empty_folder_20_times(self, files, root, monkeypatch):
        context = multiprocessing.get_context("spawn")
        barrier, answers = context.Barrier(8), context.Queue()
        with mnist_mirror.serve(files) as (url, asked):
            given = (files, root, url, barrier, answers, 20)
            crowd = [context.Process(target=load_often, args=given, daemon=True) for _ in range(8)]
            for process in crowd:
                process.start()
            sizes = [answers.get(timeout=120) for _ in range(8 * 20)]
            for process in crowd:
                process.join(timeout=30)
                assert process.exitcode == 0
            assert sizes == [(100, 23)] * 160
            # the last file, which no check of the host asks for, came once for each of the 20 folders
            one_download = 2  # torchvision asks twice: for redirections, and for the file
            assert asked.count("/t10k-labels-idx1-ubyte.gz") == 20 * one_download
        for number in range(20):
            assert [path.name for path in (root / str(number)).iterdir()] == ["MNIST"]

    def test_a_killed_download_leaves_nothing_half_written(self, files, root, monkeypatch):
        code = (
            "import sys, pathlib, common.data as data; data.torchvision_mnist().mirrors = [sys.argv[1]];"
            "data.load_mnist(pathlib.Path(sys.argv[2]))"
        )
        with mnist_mirror.serve(files, half=True) as (url, _):
            process = subprocess.Popen([sys.executable, "-c", code, url, root], cwd=ROOT)
            end = time.monotonic() + 60
            while not any(path.stat().st_size for path in root.glob(".download-*/MNIST/raw/*")):
                assert process.poll() is None and time.monotonic() < end
                time.sleep(0.05)
            process.send_signal(signal.SIGKILL)  # with half of the first file on disk
            process.wait(timeout=30)
        assert list((root / "MNIST/raw").iterdir()) == []
        with mnist_mirror.serve(files) as (url, _):
            mnist_mirror.use_files(monkeypatch, files, url)
            assert len(load_mnist(root)[0]) == 100

    @pytest.mark.parametrize("name", sorted(common.data.CRC32))
    @pytest.mark.parametrize("damage", ["truncated", "one byte", "empty"])
    def test_a_damaged_file_is_named(self, files, root, monkeypatch, name, damage):
        mnist_mirror.use_files(monkeypatch, files, "http://127.0.0.1:9/")
        raw = root / "MNIST/raw"
        raw.mkdir(parents=True)
        for file in common.data.CRC32:
            (raw / file).write_bytes((files / file).read_bytes())
        content = bytearray((raw / name).read_bytes())
        if damage == "one byte":
            content[-1] ^= 1
        (raw / name).write_bytes({"truncated": content[:-1], "one byte": content, "empty": b""}[damage])
        with pytest.raises(SystemExit) as stop:
            load_mnist(root)
        assert stop.value.code == f"error: {raw / name} is damaged: delete it and start again, or copy it anew"

    def check_fallback(self, root, capsys, url):
        start = time.monotonic()
        train_set, test_set = load_mnist(root)
        assert time.monotonic() - start < 15
        assert (len(train_set), len(test_set)) == (1438 * 9, 359)
        line = capsys.readouterr().out
        assert line.count("\n") == 1
        assert url in line and "training on the 1,797 bundled digits" in line and f"into {root / 'MNIST/raw'}." in line

    def test_a_host_that_refuses(self, root, monkeypatch, capsys):
        monkeypatch.setattr(common.data.torchvision_mnist(), "mirrors", ["http://127.0.0.1:9/"])
        self.check_fallback(root, capsys, "http://127.0.0.1:9/")
        assert not root.exists()

    def test_a_host_that_is_silent(self, root, monkeypatch, capsys):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
            monkeypatch.setattr(common.data.torchvision_mnist(), "mirrors", [url])
            self.check_fallback(root, capsys, url)

    def test_a_name_lookup_that_hangs(self, root, monkeypatch, capsys):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: time.sleep(60))
        self.check_fallback(root, capsys, common.data.torchvision_mnist().mirrors[0])

    def test_a_host_that_gives_something_else(self, files, root, monkeypatch, capsys):
        (files / "t10k-labels-idx1-ubyte.gz").write_bytes(b"<html>please log in</html>")
        with mnist_mirror.serve(files) as (url, _):
            monkeypatch.setattr(common.data.torchvision_mnist(), "mirrors", [url])
            self.check_fallback(root, capsys, url)
        assert list((root / "MNIST/raw").iterdir()) == []


def load_often(files, root, url, barrier, answers, times):
    """One of several processes: load from a new, empty folder when all others do."""
    monkeypatch = pytest.MonkeyPatch()
    mnist_mirror.use_files(monkeypatch, files, url)
    for number in range(times):
        barrier.wait(timeout=60)
        answers.put(tuple(map(len, load_mnist(root / str(number)))))


def test_nodes_with_different_data_stop_at_once(tmp_path):
    raw = tmp_path / "damaged/MNIST/raw"
    raw.mkdir(parents=True)
    for name in common.data.CRC32:
        (raw / name).write_bytes(b"not what it should be")
    options = [f"--data-dir '{folder}'" for folder in (DIGITS, tmp_path / "damaged")]
    result = run_two_nodes(ROOT / "04_ddp_torchrun/run.sh", options, tmp_path)
    assert result.output == "1 1\n", result
    lines = [line for rank in (0, 1) for line in (tmp_path / f"node{rank}.err").read_text().splitlines()]
    errors = [line for line in lines if line.startswith("error: the nodes have different data")]
    host = os.uname().nodename
    found = f"a damaged MNIST on {host}, the bundled digits on {host}"
    assert len(errors) == 1, lines
    assert errors[0].startswith(f"error: the nodes have different data ({found}): put MNIST into ")
    assert not (tmp_path / "mnist.pt").exists()


def in_7_processes(rank, folder, weights):
    """Gather and evaluate in groups of 1, 2, 3 and 7 of these processes; rank 0 of each checks the results."""
    torch.set_num_threads(1)
    script = load_script(ROOT / "04_ddp_torchrun/train.py")
    test_set = load_mnist(DIGITS)[1]
    for world_size in (1, 2, 3, 7):
        if rank < world_size:
            dist.init_process_group("gloo", f"file://{folder}/{world_size}", None, world_size, rank)
            check_gather(rank, world_size)
            check_evaluate(script, test_set, weights, rank, folder)
            dist.destroy_process_group()


def check_gather(rank, world_size):
    mine = torch.tensor([[rank, 10 * rank]])
    assert torch.equal(all_gather(mine), torch.tensor([[[r, 10 * r]] for r in range(world_size)]))
    strided = torch.arange(6).view(2, 3).t()[rank % 3]  # not contiguous
    assert torch.equal(all_gather(strided)[-1], torch.tensor([[0, 3], [1, 4], [2, 5]])[(world_size - 1) % 3])
    for length in (lambda r: r, lambda r: 3 * (r == 1), lambda r: 0):
        parts = all_gather_ragged(torch.full((length(rank), 2), float(rank)))
        assert [part.shape for part in parts] == [(length(r), 2) for r in range(world_size)]
        assert all((part == r).all() for r, part in enumerate(parts))
    for length in (1, 5, 6, 7, 20):
        indices = torch.tensor(list(DistributedSampler(range(length), shuffle=False)))
        assert torch.equal(gather_in_order(indices, length), torch.arange(length))
        assert torch.equal(gather_in_order(indices[:, None] > 3, length), torch.arange(length)[:, None] > 3)


def check_evaluate(script, test_set, weights, rank, folder):
    model = ConvNet()
    model.load_state_dict(torch.load(weights, weights_only=True))
    if rank:  # as after a step: only rank 0 has the statistics that are saved
        for buffer in model.buffers():
            buffer.add_(rank)
    sampler = DistributedSampler(test_set, shuffle=False)
    test_loader = DataLoader(test_set, 100, sampler=sampler, collate_fn=tuple)
    accuracy = script.evaluate(model, test_loader, torch.device("cpu"))
    assert model.training
    Path(folder, f"accuracy-{dist.get_world_size()}-{rank}").write_text(repr(accuracy))


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
    torch.multiprocessing.spawn(in_7_processes, (str(tmp_path), tmp_path / "weights.pt"), nprocs=7)
    seen = {path.name: float(path.read_text()) for path in tmp_path.glob("accuracy-*")}
    assert seen == {f"accuracy-{size}-{rank}": right / 359 for size in (1, 2, 3, 7) for rank in range(size)}


def test_torchvision_that_loads_is_left_alone(tmp_path):
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text("")
    (tmp_path / "torchvision/datasets.py").write_text("class MNIST: pass")
    code = "import torch, common.data as data\n"
    code += "print(data.torchvision_mnist().__module__, hasattr(torch.ops.torchvision, 'nms'))"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert answer.stdout == "torchvision.datasets False\n", answer


def test_torchvision_imports_beside_this_torch():
    code = "import common.data as data; mnist = data.torchvision_mnist();"
    code += "import torchvision; print(mnist is torchvision.datasets.MNIST)"
    answer = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert answer.stdout == "True\n" and answer.stderr == "", answer
