"""In place of a folder of images and of a large network, and a better first epoch."""

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet


def change(script, rank):
    torch.manual_seed(3)
    images = torch.utils.data.TensorDataset(
        torch.randn(35, 3, 33, 33), torch.arange(35) // 12
    )
    images.classes = [0, 1, 2]
    scores = iter((0.5, 0.25))

    def norm(channels):  # of each image by itself
        return nn.InstanceNorm2d(channels, affine=True, track_running_stats=True)

    script.ImageFolder = lambda path, prepare: images
    script.resnet18 = lambda weights: ResNet(BasicBlock, [1] * 4, norm_layer=norm)
    script.evaluate = lambda *given: next(scores)
