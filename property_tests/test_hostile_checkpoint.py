"""Properties of checkpoints on a disk that changes them: a whole one is loaded, or a typed error
says which file is at fault.
"""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
import warnings
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests.strategies import inputs
from property_tests.test_hostile_input import (
    bounded_memory,
    changed_bytes,
    changed_json,
    may_refuse,
)
from torch.utils._pytree import tree_leaves

import bagua_ref
from bagua_ref import checkpoint
from bagua_ref.algorithms import Algorithm
from bagua_ref.checkpoint.folder import _checksum, read_manifest
from bagua_ref.checkpoint.plain import read_plain
from bagua_ref.errors import CheckpointError
from bagua_ref.simulation import SimulatedWorld

SAMPLES = tempfile.TemporaryDirectory()


def in_training(function):
    """Return ``function(model, optimizer)``, called in a world of one rank."""

    def rank(comm):
        bagua_ref.init_process_group()
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.with_bagua([optimizer], Algorithm.init("bytegrad", hierarchical=False))
        return function(model, optimizer)

    return SimulatedWorld(1).run(rank)[0]


@functools.cache
def saved():
    """Return a folder with checkpoints of two steps, and the weights at each of them."""
    folder, weights = Path(SAMPLES.name, "checkpoints"), {}

    def train(model, optimizer):
        for step in (1, 2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            checkpoint.save(folder, model, optimizer, step=step)
            weights[step] = model.weight.detach().clone()

    in_training(train)
    return folder, weights


@inputs(25)
@given(data=st.data())
def test_S5_a_change_to_one_file_never_leads_to_other_weights_than_those_saved(data):
    folder, weights = saved()
    with tempfile.TemporaryDirectory() as temporary, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they name the damaged file
        copy = shutil.copytree(folder, Path(temporary, "checkpoints"))
        path = data.draw(st.sampled_from(sorted(copy.rglob("*.*"))), label="file")
        content = path.read_bytes()
        path.write_bytes(
            data.draw(
                changed_json(json.loads(content))
                if path.suffix == ".json"
                else changed_bytes(content)
            )
        )

        def load(model, optimizer):
            found = checkpoint.load(copy, model, optimizer)
            assert torch.equal(model.weight, weights[found.step])

        in_training(load)


@given(data=st.data())
def test_S5_any_part_is_read_or_refused_by_name_in_memory_of_its_size(data):
    path = next(saved()[0].rglob("common-*.pt"))
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder, "common.pt")
        changed.write_bytes(content := data.draw(changed_bytes(path.read_bytes())))
        with bounded_memory(len(content)), may_refuse(CheckpointError, str(changed)):
            tensors = [
                leaf for leaf in tree_leaves(read_plain(changed)) if isinstance(leaf, torch.Tensor)
            ]
            assert sum(tensor.nbytes for tensor in tensors) <= len(content)


@given(data=st.data())
def test_S5_any_manifest_is_read_or_refused_by_name_even_if_its_checksum_fits(data):
    manifest = json.loads(next(saved()[0].rglob("manifest.json")).read_text())["manifest"]
    text = data.draw(changed_json(manifest))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder, "step_00000002")
        place.mkdir()
        path = place / "manifest.json"
        try:
            whole = {"manifest": json.loads(text), "sha256": _checksum(json.loads(text))}
            content = json.dumps(whole).encode()
        except RecursionError:
            content = b'{"manifest": ' + text + b', "sha256": ""}'
        path.write_bytes(content)
        with bounded_memory(len(content)), may_refuse(CheckpointError, str(path)):
            read_manifest(place)
