"""A program for ``verify --command`` with every part, which returns what is expected, with the fault
chosen.

python process_program.py ["planted" | "errors"]; ranks exchange files in the folder
of their world.
"""

from __future__ import annotations

import base64
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bagua_ref.backends.base import KernelBackend
from bagua_ref.conformance.cases.answers import answer
from bagua_ref.conformance.cases.tensor_files import name_of
from bagua_ref.conformance.expected import collectives_plain
from bagua_ref.conformance.expected.codecs_scalar import FORMATS, MINMAX, payload_size
from bagua_ref.conformance.targets.process_link import DTYPES

KERNELS = [name.strip("_") for name in KernelBackend.__abstractmethods__]
FAULT = sys.argv[1] if len(sys.argv) > 1 else ""


class World:
    """All-to-all exchange of bytes by files, and collectives made of it."""

    def __init__(self, header: dict[str, Any]) -> None:
        self.rank, self.n, self.folder, self.round = (
            header["rank"],
            header["nranks"],
            Path(header["folder"]),
            0,
        )

    def everyone(self, mine: bytes) -> list[bytes]:
        """Return what every rank brings to this round."""
        self.round += 1
        self._write(f"{self.round}-{self.rank}", mine)
        return [self._read(f"{self.round}-{rank}") for rank in range(self.n)]

    def send(self, mine: bytes, dst: int, number: int) -> None:
        self._write(f"p-{self.rank}-{dst}-{number}", mine)

    def recv(self, src: int, number: int) -> bytes:
        return self._read(f"p-{src}-{self.rank}-{number}")

    def _write(self, name: str, data: bytes) -> None:
        (self.folder / f"{name}.part").write_bytes(data)
        (self.folder / f"{name}.part").rename(self.folder / name)

    def _read(self, name: str) -> bytes:
        while not (self.folder / name).exists():
            time.sleep(0.0005)
        return (self.folder / name).read_bytes()


def raw(x: Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


class Program:
    def __init__(self) -> None:
        self.world: Any = None
        self.sent: dict[tuple[str, int], int] = {}

    def number(self, way: str, peer: int) -> int:
        self.sent[way, peer] = self.sent.get((way, peer), -1) + 1
        return self.sent[way, peer]

    def answer(
        self, header: dict[str, Any], t: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        call = header["call"]
        if call == "hello":
            has = {"kernels": KERNELS, "codecs": [MINMAX, "OneBit", *FORMATS], "collectives": True}
            return {"protocol": 2, "name": "everything", **has}, {}
        if FAULT == "errors" and call != "world":
            return {"error": "no cheese"}, {}
        if call == "payload_bytes":
            return {"value": payload_size(header["codec"], header["num_elements"])}, {}
        if call not in KERNELS and call not in ("compress", "decompress"):
            return {}, self.collective(call, header, t)
        others = ("id", "call", "tensors", "dtype", "one_minus_beta1")
        given = {name: value for name, value in header.items() if name not in others}
        dtypes = [header["dtype"]] if "dtype" in header else [name_of(x.dtype) for x in t.values()]
        operation = f"{'kernels' if call in KERNELS else 'codecs'}/{call}"
        found = answer(operation, [*dtypes, "float32"][0], t, given)
        if FAULT == "planted" and call == "add_scaled":
            found["x"] += header["factor"] * 1e-3
        return {}, found

    def collective(
        self, call: str, header: dict[str, Any], t: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        if call == "world":
            self.world, self.sent = World(header), {}
            return {}
        world, x = self.world, t.get("x", torch.empty(0))
        if call == "exchange":
            for place, peer in enumerate(header["sends"]):
                world.send(raw(t[f"send{place}"]), peer, self.number("to", peer))
            return {
                f"recv{place}": tensor(
                    world.recv(part["src"], self.number("from", part["src"])), DTYPES[part["dtype"]]
                )
                for place, part in enumerate(header["recvs"])
            }
        dtype = DTYPES[header["dtype"]] if call == "scatter" else x.dtype
        parts = [tensor(part, dtype) for part in world.everyone(raw(x))]
        root = header.get("root", world.rank)
        if call == "barrier":
            return {}
        if call == "scatter":
            out = collectives_plain.scatter(parts[root], world.n)[world.rank]
        elif call == "gather":
            out = collectives_plain.gather(torch.stack(parts))
        else:
            given = {name: header[name] for name in ("op", "root") if name in header}
            out = getattr(collectives_plain, call)(torch.stack(parts), **given)[world.rank]
        if FAULT == "planted" and "op" in header and world.n > 2 and world.rank == 1:
            out = out + 1
        if call in ("gather", "reduce") and root != world.rank:
            return {}
        return {"out": out}


def main() -> None:
    torch.set_num_threads(1)
    program = Program()
    for line in sys.stdin:
        header = json.loads(line)
        t = {
            name: tensor(base64.b64decode(x["data"]), DTYPES[x["dtype"]]).view(x["shape"])
            for name, x in header["tensors"].items()
        }
        try:
            members, outputs = program.answer(header, t)
        except Exception as error:
            members, outputs = {"error": f"{type(error).__name__}: {error}"}, {}
        tensors = {
            name: {
                "dtype": str(x.dtype).removeprefix("torch."),
                "shape": list(x.shape),
                "data": base64.b64encode(raw(x)).decode(),
            }
            for name, x in outputs.items()
        }
        print(json.dumps({"id": header["id"], **members, "tensors": tensors}), flush=True)


if __name__ == "__main__":
    main()
