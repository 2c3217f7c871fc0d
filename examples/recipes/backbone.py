"""Backbones: class capsules on the feature map of a network from torchvision (the capsules of Sabour et al. 2017).

The images are the digits, enlarged to 32 x 32 pixels in three equal channels. The backbone is torchvision's ShuffleNet
of few blocks and channels, up to its third stage. It starts from random weights, is trained with each head, and makes
of an image a map of 64 channels and 2 x 2 places. One head makes capsules of the map and routes them to classes. The
plain head, a hidden layer and a linear one, has about as many parameters. Numbers: accuracy on the test digits.
"""

from recipe import Labelled, Numbers, command, digits, fit
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import ShuffleNetV2, feature_extraction

from capsfast.nn import DigitCaps, Length, MarginLoss, PrimaryCaps

SIZE, CHANNELS, PLACES, TYPES, HIDDEN = 32, 64, 2 * 2, 8, 169


class OnBackbone(nn.Module):
    def __init__(self, *head: nn.Module) -> None:
        super().__init__()
        whole = ShuffleNetV2(stages_repeats=[2, 2, 2], stages_out_channels=[16, 32, CHANNELS, 128, 128])
        self.backbone = feature_extraction.create_feature_extractor(whole, ["stage3"])
        self.head = nn.Sequential(*head)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.head(self.backbone(images)["stage3"])  # [B, CHANNELS, 2, 2] to [B, 10]
        return scores


def enlarged(images: Labelled) -> Labelled:
    inputs = F.interpolate(images.inputs, size=(SIZE, SIZE), mode="bilinear")
    return Labelled(inputs.expand(-1, 3, -1, -1), images.labels)


def main(steps: int = 600) -> Numbers:
    train, test = map(enlarged, digits())
    primary = PrimaryCaps(CHANNELS, TYPES, dim=8, kernel_size=1, stride=1)
    capsules = OnBackbone(primary, DigitCaps(TYPES * PLACES, 10, 8, 16), Length())
    hidden = nn.Linear(CHANNELS * PLACES, HIDDEN)
    plain = OnBackbone(nn.Flatten(), hidden, nn.ReLU(), nn.Linear(HIDDEN, 10))
    numbers = {}
    for name, net, loss in (("capsules", capsules, MarginLoss()), ("plain", plain, F.cross_entropy)):
        fit(net, lambda x, labels, net=net, loss=loss: loss(net(x), labels), train.batches(), steps, 0.01, name)
        numbers[name] = test.accuracy(net)
    return numbers


if __name__ == "__main__":
    command(main)
