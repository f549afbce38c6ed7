"""common/: the network, the data and the gather helpers."""

import shutil
import socket
import subprocess
import sys
import time
from datetime import timedelta

import mnist_mirror
import pytest
import torch
import torch.distributed as dist
from helpers import DIGITS, ROOT, bare_accuracy, exit_codes, load_script, start
from torch.utils.data import DataLoader, DistributedSampler

import common.data
from common.data import already_batched, load_mnist
from common.gather import all_gather, all_gather_ragged, gather_in_order
from common.model import ConvNet

DIGIT_SETS = load_mnist(DIGITS)


def in_processes(function, count, *arguments):
    """Call function(rank, ...) in processes."""
    ranks = start(function, [(rank, *arguments) for rank in range(count)])
    assert exit_codes(ranks) == [0] * count


def test_no_test_image_is_in_the_training_set():
    train, test = ({image.numpy().tobytes() for image in part.tensors[0]} for part in DIGIT_SETS)
    assert len(train) > 10_000 and not test & train


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
        load_mnist(root)
    monkeypatch.setattr(common.data, "torchvision_mnist", None)  # only the download needs it
    train_set, test_set = load_mnist(root)
    assert (len(train_set), len(test_set)) == (100, 23)
    names = ("train-images-idx3-ubyte", "t10k-images-idx3-ubyte")
    pixels = [torch.tensor(list((files / name).read_bytes()[16:])) for name in names]
    assert torch.equal(train_set.tensors[0].flatten(), pixels[0])
    expected = pixels[1].view(23, 1, 28, 28) / 255
    ((images, labels),) = DataLoader(test_set, 3, sampler=[7, 3, 22], collate_fn=already_batched)
    torch.testing.assert_close(images, expected[[7, 3, 22]])
    assert labels.tolist() == [7, 3, 2] and test_set[22][1] == 2
    torch.testing.assert_close(test_set[22][0], expected[22])
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


def test_a_damaged_file_is_named(files, root, monkeypatch):
    mnist_mirror.use_files(monkeypatch, files, "http://127.0.0.1:9/")
    raw = root / "MNIST/raw"
    shutil.copytree(files, raw)
    damaged = raw / "t10k-labels-idx1-ubyte"
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(SystemExit) as stop:
        load_mnist(root)
    how = "delete it and run again, or copy it again"
    assert stop.value.code == f"error: {damaged} is damaged: {how}"


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


def load_slowly(rank, folder):
    """Rank 0 prepares the data for longer than the collective timeout, while rank 1 waits."""
    dist.init_process_group("gloo", f"file://{folder}/store", timedelta(seconds=2), 2, rank)
    prepare = common.data.prepare_mnist
    common.data.prepare_mnist = lambda root: time.sleep(4) or prepare(root)
    pytest.MonkeyPatch().setenv("LOCAL_RANK", str(rank))
    assert len(load_mnist(DIGITS)[1]) == 359
    dist.destroy_process_group()


def test_a_slow_download_does_not_end_the_ranks_that_wait(tmp_path):
    in_processes(load_slowly, 2, tmp_path)


def load_different_data(rank, folder, roots, lines):
    """Load from another folder on each of two nodes."""
    dist.init_process_group("gloo", f"file://{folder}/store", None, 2, rank)
    pytest.MonkeyPatch().setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit) as stop:
        load_mnist(roots[rank])
    assert not dist.is_initialized()
    assert stop.value.code == lines[rank]


def test_nodes_with_different_data_end_with_one_line(tmp_path):
    raw = tmp_path / "damaged/MNIST/raw"
    raw.mkdir(parents=True)
    for name in common.data.CRC32:
        (raw / name).write_bytes(b"not what it should be")
    host = socket.gethostname()
    found = f"a damaged MNIST on {host}, the bundled digits on {host}"
    line = f"error: the nodes have different data ({found}): copy MNIST to {DIGITS} on every node"
    in_processes(load_different_data, 2, tmp_path, (DIGITS, tmp_path / "damaged"), (line, 1))


def gather_and_evaluate(rank, folder, weights, expected):
    """Gather and evaluate in groups of 1, 2, 3 and 7 of the processes."""
    torch.set_num_threads(1)
    script = load_script(ROOT / "04_ddp_torchrun/train.py")
    for size in (1, 2, 3, 7):
        if rank < size:
            dist.init_process_group("gloo", f"file://{folder}/{size}", None, size, rank)
            check_gather(rank, size)
            assert evaluate(script, weights, rank) == expected
            dist.destroy_process_group()


def check_gather(rank, size):
    mine = torch.tensor([[rank, 10 * rank]])
    assert torch.equal(all_gather(mine), torch.tensor([[[r, 10 * r]] for r in range(size)]))
    columns = torch.arange(2 * size).view(2, size).t()  # not contiguous
    assert torch.equal(all_gather(columns[rank]), columns)
    for length in (lambda r: r, lambda r: 3 * (r == 1), lambda r: 0):
        parts = all_gather_ragged(torch.full((length(rank), 2), rank))
        assert [part.tolist() for part in parts] == [[[r, r]] * length(r) for r in range(size)]
    for length in (1, 5, 6, 7, 20):
        indices = torch.tensor(list(DistributedSampler(range(length), shuffle=False)))
        rows = gather_in_order(indices[:, None], length)
        assert torch.equal(rows, torch.arange(length)[:, None])


def evaluate(script, weights, rank):
    model = ConvNet()
    model.load_state_dict(torch.load(weights, weights_only=True))
    if rank:  # as after a step: only rank 0 has the statistics that are saved
        for buffer in model.buffers():
            buffer.add_(rank)
    sampler = DistributedSampler(DIGIT_SETS[1], shuffle=False)
    test_loader = DataLoader(DIGIT_SETS[1], 100, sampler=sampler, collate_fn=already_batched)
    accuracy = script.evaluate(model, test_loader, torch.device("cpu"))
    assert model.training
    return accuracy


def test_gather_and_exact_evaluation_on_1_2_3_and_7_processes(tmp_path):
    torch.manual_seed(0)
    model, weights = ConvNet(), tmp_path / "weights.pt"
    images, labels = DIGIT_SETS[1].__getitems__(list(range(100)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(25):  # enough to be often right and often wrong
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    torch.save(model.state_dict(), weights)
    assert 0.5 < bare_accuracy(weights) < 1
    in_processes(gather_and_evaluate, 7, tmp_path, weights, bare_accuracy(weights))


@pytest.mark.slow
def test_torchvision_imports_whatever_build_of_torch_there_is():
    code = "import common.data as data; mnist = data.torchvision_mnist();"
    code += "import torchvision; print(mnist is torchvision.datasets.MNIST)"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (answer.stdout, answer.stderr) == ("True\n", "")
