"""A small data set in MNIST's format, and a local server that stands in for MNIST's host."""

import gzip
import hashlib
import http.server
import struct
import threading
from contextlib import contextmanager

import torch
from helpers.scripts import declare_torchvision_operators

import common.data as data


def make_files(folder):
    """Write MNIST's four files, plain and compressed, with 100 training and 23 test images."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 100), ("t10k", 23)):
        pixels = torch.randint(0, 256, (count, 28, 28), generator=generator, dtype=torch.uint8)
        images = struct.pack(">IIII", 2051, count, 28, 28) + pixels.numpy().tobytes()
        labels = struct.pack(">II", 2049, count) + bytes(index % 10 for index in range(count))
        for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{part}-{kind}-ubyte").write_bytes(content)
            (folder / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))


def use_files(monkeypatch, folder, mirror):
    """Let common.data and torchvision take the files of a folder for MNIST, from this mirror."""
    sizes = {name: (folder / name).stat().st_size for name in data.BYTES}
    monkeypatch.setattr(data, "BYTES", sizes)
    files = [folder / f"{name}.gz" for name in data.BYTES]
    compressed = [(file.name, hashlib.md5(file.read_bytes()).hexdigest()) for file in files]
    declare_torchvision_operators()
    monkeypatch.setattr("torchvision.datasets.MNIST.resources", compressed)
    monkeypatch.setattr("torchvision.datasets.MNIST.mirrors", [mirror])


@contextmanager
def serve(folder, half=False):
    """Serve a folder, or only the first half of each file, by a URL."""
    ended = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            content = (folder / self.path[1:]).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if half else content)
            self.wfile.flush()
            if half:
                ended.wait(60)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        ended.set()
        server.shutdown()
