"""The network that every script trains."""

from torch import nn


class ConvNet(nn.Module):
    """Two convolution blocks and a linear layer, 29,034 parameters: [N, 1, 28, 28] to [N, 10]."""

    def __init__(self):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16),
                                    nn.ReLU(), nn.MaxPool2d(2))
        self.layer2 = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32),
                                    nn.ReLU(), nn.MaxPool2d(2))
        self.fc = nn.Linear(7 * 7 * 32, 10)

    def forward(self, images):
        return self.fc(self.layer2(self.layer1(images)).flatten(1))
