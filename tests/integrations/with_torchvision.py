"""The run of a script that imports timm and torchvision: `python
tests/integrations/with_torchvision.py SCRIPT ARGUMENTS`.

Package indexes have torchvision for CUDA. Beside a torch without CUDA its operators do not load,
and importing it fails as two of them are not declared. No model here calls these.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

TIMM = Path(sys.prefix) / "timm"
"""Where the Makefile installs them."""


def main() -> None:
    sys.path.append(str(TIMM))
    if torch.version.cuda is None:
        for operator in ("nms", "qnms"):  # both suppress boxes that overlap
            torch.library.define(
                f"torchvision::{operator}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
