"""A program for ``verify --command`` with every part, made of the package's own, and with the fault
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

from bagua_ref.backends import get_backend, get_codec
from bagua_ref.conformance.expected import collectives_plain
from bagua_ref.conformance.targets.process_link import DTYPES

KERNELS = (
    "add",
    "subtract",
    "add_scaled",
    "average",
    "divide",
    "combine_ring",
    "async_average",
    "update_momentum",
    "reduce_chunks",
    "gather_flat",
    "scatter_flat",
    "order_by_complexity",
)
FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
BACKEND = get_backend("reference")


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
            has = {"kernels": KERNELS, "codecs": [*BACKEND.codecs], "collectives": True}
            return {"protocol": 2, "name": "everything", **has}, {}
        if FAULT == "errors" and call != "world":
            return {"error": "no cheese"}, {}
        if call in KERNELS:
            return {}, self.kernel(call, header, t)
        if call in ("payload_bytes", "compress", "decompress"):
            return self.codec(call, header, t)
        return {}, self.collective(call, header, t)

    def kernel(self, call: str, header: dict[str, Any], t: dict[str, Tensor]) -> dict[str, Tensor]:
        if call == "order_by_complexity":
            return {"order": BACKEND.order_by_complexity(t["keys"])}
        if call == "gather_flat":
            flat = torch.cat([x.reshape(-1) for x in t.values()]) if t else torch.empty(0)
            return {"flat": flat}
        if call == "scatter_flat":
            outs = [torch.empty(shape, dtype=t["flat"].dtype) for shape in header["shapes"]]
            BACKEND.scatter_flat(t["flat"], outs)
            return {f"t{place}": x for place, x in enumerate(outs)}
        x, *others = t.values()
        numbers = [
            header[name] for name in ("factor", "divisor", "nranks", "beta1") if name in header
        ]
        if call == "reduce_chunks":
            numbers = [header[name] for name in ("num_chunks", "target_chunk", "average")]
        if call == "update_momentum":  # from the rounded factors, which the request has
            BACKEND._update_momentum_(x, *others, header["beta1"], header["one_minus_beta1"])
        else:
            getattr(BACKEND, f"{call}_")(x, *others, *numbers)
        if FAULT == "planted" and call == "add_scaled":
            x += header["factor"] * 1e-3
        return {"x": x}

    def codec(
        self, call: str, header: dict[str, Any], t: dict[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        codec = get_codec(header["codec"], BACKEND)
        if call == "payload_bytes":
            return {
                "value": codec.payload_bytes(header["num_elements"], DTYPES[header["dtype"]])
            }, {}
        if call == "compress":
            found = codec.compress(
                t["x"], header["num_chunks"], header.get("target_chunk"), t.get("payload")
            )
            return {}, {"payload": found}
        out = torch.empty(header["num_elements"], dtype=DTYPES[header["dtype"]])
        codec.decompress(t["payload"], header["num_chunks"], out)
        return {}, {"x": out}

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
