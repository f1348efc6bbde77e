"""MPI's collectives, checked by ``bagua-ref verify``: a program with one process for each rank,
started by ``mpirun``.

    bagua-ref verify --suite collectives --command "python examples/verify_mpi4py.py" --launch
    "mpirun -n {ranks}"

needs mpi4py and an MPI, such as ``pip install mpi4py mpich``. Replace the calls of MPI by those of
your own library to check it.
"""

from __future__ import annotations

import json
import os
import socket
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

Array = npt.NDArray[Any]
WIDTH = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "float32": 4,
    "int64": 8,
    "float64": 8,
}


def numbers(raw: bytes, dtype: str) -> Array:
    """Return a tensor as NumPy numbers; bfloat16, which NumPy lacks, as float32."""
    if dtype == "bfloat16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, np.dtype(dtype).newbyteorder("<"))


def tensor(x: Array, dtype: str) -> bytes:
    """Return the bytes of a tensor; float32 is rounded to bfloat16, to nearest-even."""
    if dtype == "bfloat16":
        bits = x.astype(np.float32).view(np.uint32)
        return (
            np.where(np.isnan(x), 0x7FC0, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)
            .astype("<u2")
            .tobytes()
        )
    return x.astype(np.dtype(dtype).newbyteorder("<")).tobytes()


def reduced(comm: MPI.Intracomm, raw: bytes, dtype: str, op: str) -> bytes:
    """Return the reduction over all ranks; 16-bit floats are added in float32, as MPI knows neither
    of them.
    """
    x = numbers(raw, dtype)
    wide = x.astype(np.float32) if dtype in ("float16", "bfloat16") else x.copy()
    # MPI does not say what the largest of a NaN is: look for NaNs first.
    nans = np.zeros(wide.size, np.uint8)
    if wide.dtype.kind == "f":
        comm.Allreduce(np.isnan(wide).astype(np.uint8), nans, MPI.MAX)
    out = np.empty_like(wide)
    native = {"AVG": MPI.SUM, "PRODUCT": MPI.PROD}.get(op) or getattr(MPI, op)
    comm.Allreduce(wide, out, native)
    if op == "AVG":
        out /= out.dtype.type(comm.size)
    if op in ("MIN", "MAX") and out.dtype.kind == "f":
        out[nans > 0] = np.nan
    return tensor(out, dtype)


def answer(
    comm: MPI.Intracomm, header: dict[str, Any], sent: dict[str, tuple[bytes, str]]
) -> dict[str, tuple[bytes, str]]:
    """Return the tensors of the answer to one request; all but reductions moves bytes."""
    call, root = header["call"], header.get("root", 0)
    raw, dtype = sent.get("x", (b"", header.get("dtype", "")))
    width = WIDTH.get(dtype, 1)
    if call == "barrier":
        comm.Barrier()
    elif call == "send":
        comm.Send([raw, MPI.BYTE], header["dst"])
    elif call == "recv":
        out = bytearray(header["elements"] * width)
        comm.Recv([out, MPI.BYTE], header["src"])
        return {"x": (bytes(out), dtype)}
    elif call == "exchange":
        outs = [bytearray(part["elements"] * WIDTH[part["dtype"]]) for part in header["recvs"]]
        waits = [
            comm.Irecv([out, MPI.BYTE], part["src"])
            for out, part in zip(outs, header["recvs"], strict=True)
        ]
        waits += [
            comm.Isend([sent[f"send{place}"][0], MPI.BYTE], peer)
            for place, peer in enumerate(header["sends"])
        ]
        MPI.Request.Waitall(waits)
        return {
            f"recv{place}": (bytes(out), header["recvs"][place]["dtype"])
            for place, out in enumerate(outs)
        }
    elif call == "broadcast":
        out = bytearray(raw)
        comm.Bcast([out, MPI.BYTE], root)
        return {"x": (bytes(out), dtype)}
    elif call in ("gather", "allgather"):
        out = bytearray(len(raw) * comm.size)
        if call == "allgather":
            comm.Allgather([raw, MPI.BYTE], [out, MPI.BYTE])
        else:
            comm.Gather([raw, MPI.BYTE], [out, MPI.BYTE] if comm.rank == root else None, root)
        if call == "allgather" or comm.rank == root:
            return {"out": (bytes(out), dtype)}
    elif call == "scatter":
        out = bytearray(header["elements"] * WIDTH[header["dtype"]])
        comm.Scatter([raw, MPI.BYTE] if comm.rank == root else None, [out, MPI.BYTE], root)
        return {"out": (bytes(out), header["dtype"])}
    elif call == "alltoall":
        out = bytearray(len(raw))
        comm.Alltoall([raw, MPI.BYTE], [out, MPI.BYTE])
        return {"out": (bytes(out), dtype)}
    elif call in ("allreduce", "reduce", "reduce_scatter"):
        total = reduced(comm, raw, dtype, header["op"])
        if call == "reduce_scatter":
            part = len(total) // comm.size
            total = total[comm.rank * part : (comm.rank + 1) * part]
        if call != "reduce" or comm.rank == root:
            return {"out": (total, dtype)}
    return {}


def main() -> None:
    """Connect, say which rank this is, and answer requests until the connection ends."""
    everyone = MPI.COMM_WORLD
    host, _, port = os.environ["BAGUA_REF_CONNECT"].rpartition(":")
    connection = socket.create_connection((host, int(port)))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream = connection.makefile("rwb")
    stream.write(json.dumps({"rank": everyone.rank, "tensors": []}).encode() + b"\n")
    stream.flush()
    comm = everyone
    while line := stream.readline():
        header, sent, found = json.loads(line), {}, {}
        for entry in header["tensors"]:
            size = int(np.prod(entry["shape"])) * WIDTH[entry["dtype"]]
            sent[entry["name"]] = (stream.read(size), entry["dtype"])
        members: dict[str, Any] = {}
        try:
            if header["call"] == "hello":
                members = {"protocol": 1, "name": "mpi4py", "collectives": True}
            elif header["call"] == "world":  # the first nranks ranks
                group = everyone.group.Incl(range(header["nranks"]))
                comm = everyone.Create_group(group, header["world"])
            else:
                found = answer(comm, header, sent)
        except Exception as error:
            members = {"error": f"{type(error).__name__}: {error}"}
        members["tensors"] = [
            {"name": name, "dtype": dtype, "shape": [len(raw) // WIDTH[dtype]]}
            for name, (raw, dtype) in found.items()
        ]
        stream.write(
            json.dumps(members).encode() + b"\n" + b"".join(raw for raw, _ in found.values())
        )
        stream.flush()
    os._exit(0)  # the checks have ended; MPI_Finalize would wait for ranks that they have not


if __name__ == "__main__":
    main()
