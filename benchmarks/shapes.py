"""Shapes of the parameters of models that people train, for benchmarks of what a parameter
costs.
"""

from __future__ import annotations

Shapes = list[tuple[int, ...]]


def resnet50() -> Shapes:
    """ResNet-50 on ImageNet: 161 parameters, 25.6e6 elements."""

    def convolution(inputs: int, outputs: int, kernel: int) -> Shapes:
        return [(outputs, inputs, kernel, kernel), (outputs,), (outputs,)]  # and its batch norm

    shapes, channels = convolution(3, 64, 7), 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += (
                convolution(channels, width, 1)
                + convolution(width, width, 3)
                + convolution(width, 4 * width, 1)
            )
            if not block:
                shapes += convolution(channels, 4 * width, 1)
            channels = 4 * width
    return [*shapes, (1000, channels), (1000,)]


def gpt2(width: int = 768, layers: int = 12, vocabulary: int = 50257) -> Shapes:
    """GPT-2, by default the smallest: 148 parameters, 124e6 elements; 10.9e6 with width 256 and a
    vocabulary of 4,608.
    """
    norm: Shapes = [(width,), (width,)]
    attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    perceptron = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [
        (vocabulary, width),
        (1024, width),
        *layers * [*norm, *attention, *norm, *perceptron],
        *norm,
    ]


def mixture(width: int = 64, layers: int = 10, experts: int = 64) -> Shapes:
    """A small transformer with a mixture of gated experts: 2,000 parameters, 15.9e6 elements."""
    shared = [
        (width,),
        (width,),
        (3 * width, width),
        (3 * width,),
        (width, width),
        (width,),
        (width,),
        (experts, width),
    ]
    expert = [(2 * width, width), (2 * width, width), (width, 2 * width)]
    return layers * [*shared, *experts * expert]
