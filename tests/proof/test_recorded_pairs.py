"""Proof that equal runs do not differ: 100 pairs of random networks, optimizers and seeds, half of
them restarted.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tests.recorded_trainings import STEPS, Training
from torch import nn

from bagua_ref.record import diff_records

OPTIMIZERS = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
    lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
]


class Random(Training):
    """A training of a network that a number chooses."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__()

    def build(self) -> None:
        draw = random.Random(self.number)
        torch.manual_seed(self.number)
        random.seed(self.number)
        width = draw.randint(1, 40)
        middle = [
            draw.choice([nn.Tanh(), nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(width)])
            for _ in range(draw.randint(0, 3))
        ]
        self.model = nn.Sequential(
            nn.Linear(6, width), *middle, nn.Linear(width, draw.randint(1, 4))
        )
        self.optimizer = draw.choice(OPTIMIZERS)(self.model.parameters())


@pytest.mark.parametrize("number", range(100))
def test_equal_runs_do_not_differ(number: int, tmp_path: Path) -> None:
    Random(number).run(tmp_path / "a")
    if number % 2:
        Random(number).run(tmp_path / "b", stop=4)
        saved, second = Random(number), Random(number)
        saved.run(None, stop=3)
        states = torch.get_rng_state(), random.getstate()
        second.model.load_state_dict(saved.model.state_dict())
        second.optimizer.load_state_dict(saved.optimizer.state_dict())
        second.first = 3
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        second.run(tmp_path / "b")
    else:
        Random(number).run(tmp_path / "b")
    report = diff_records(tmp_path / "a", tmp_path / "b")
    assert report.first is None, str(report)
    assert report.steps == list(range(STEPS))
