# ruff: noqa: E501 - a line of the table is a mutant
"""Planted faults of the cache: name, clause, file, original text, mutated text."""

from __future__ import annotations

LOADER, BUFFER, GUARD, CODEC, ARRAYS = (
    "contrib/cache_loader.py",
    *(f"contrib/cache/{name}.py" for name in ("write_buffer", "guard", "codec", "arrays")),
)
DATASET, STORE, REDIS = "contrib/cached_dataset.py", "contrib/utils/store.py", "contrib/utils/redis_store.py"
NAMES = 'return f"{dataset}_{_text(key)}"'
CACHES: list[tuple[str, str, str, str, str]] = [
    ("keys go without the dataset's name", "S8.1", LOADER, NAMES, "return _text(key)"),
    ("keys are written as Python writes them", "S8.1", LOADER, NAMES, 'return f"{dataset}_{key!r}"'),
    ("lone surrogates become question marks", "S8.1", LOADER, NAMES, 'return f"{dataset}_{_text(key)}".encode(errors="replace").decode()'),
    ("lone surrogates are left out", "S8.1", LOADER, NAMES, 'return f"{dataset}_{_text(key)}".encode(errors="ignore").decode()'),
    ("lone surrogates are refused", "S8.1", STORE, 'key.encode("utf-8", "surrogatepass")', "key.encode()"),
    ("whatever has a text is a key", "S8.1", LOADER, "    except TypeError:\n        raise TypeError(", "    except TypeError:\n        return str(key)\n        raise TypeError("),
    ("whatever has a text may be in a key", "S8.1", LOADER, "items = map(_plain, key)", "items = iter(key)"),
    ("what was read is returned again", "S8.2", LOADER, "                    value = decode(data, self._allow_pickle)\n", "                    value = self.__dict__.setdefault('_seen', {}).setdefault(data, decode(data, self._allow_pickle))\n"),
    ("the hash is of the key in UTF-16", "S8.1", STORE, "xxh64_intdigest(encoded_key(key))", 'xxh64_intdigest(key.encode("utf-16", "surrogatepass"))'),
    ("the hash has another seed", "S8.1", STORE, "xxh64_intdigest(encoded_key(key))", "xxh64_intdigest(encoded_key(key), seed=1)"),
    ("the hash leaves the dataset's name out", "S8.1", STORE, "xxh64_intdigest(encoded_key(key))", 'xxh64_intdigest(encoded_key(key.rpartition("_")[2]))'),
    ("every node uses the first store", "S8.1", REDIS, "hosts[get_node_rank() % len(hosts)]", "hosts[0]"),
    ("a cached None is made again", "S8.2", LOADER, "            values.append(value)\n", "            if value is None and place not in missing:\n                missing.append(place)\n            values.append(value)\n"),
    ("what waits is lost at close()", "S8.2", LOADER, "        self.flush()\n        self._guarded.close()\n", "        self._guarded.close()\n"),
    ("what waits is lost at a worker's exit", "S8.2", BUFFER, "        util.Finalize(self, _write, rest, exitpriority=_FLUSH_PRIORITY)\n", ""),
    ("the buffer is written one value too late", "S8.2", BUFFER, "len(self._values) >= self._size", "len(self._values) > self._size"),
    ("what waits cannot be read", "S8.2", BUFFER, "return self._values.get(key) if", "return None if"),
    ("a worker writes what its parent had waiting", "S8.2", BUFFER, "        if self._pid != os.getpid():\n            self._reset()\n", "        if self._pid != os.getpid():\n"),
    ("the last value of several is not written", "S8.2", BUFFER, "            store.mset(batch)  #", "            store.mset(dict(list(batch.items())[: max(1, len(batch) - 1)]))  #"),
    ("only one store is written", "S8.2", STORE, "for index, part in parts.items():\n            self.stores[index].mset(part)", "for index, part in list(parts.items())[:1]:\n            self.stores[index].mset(part)"),
    ("num_keys leaves out what waits", "S8.2", LOADER, "        self.flush()\n        return self._guarded.num_keys()\n", "        return self._guarded.num_keys()\n"),
    ("num_keys counts one store", "S8.2", STORE, "sum(store.num_keys() for store in self.stores)", "self.stores[0].num_keys()"),
    ("a batch comes in the order of stores", "S8.2", STORE, "[found[place] for place in range(len(keys))]", "list(found.values())"),
    ("every sample of a batch is made if one is missing", "S8.2", LOADER, "        if not missing:\n            return values\n", "        if not missing:\n            return values\n        missing = list(range(len(names)))\n"),
    ("a changed value is returned", "S8.3", CODEC, "    if xxhash.xxh3_64_intdigest(view[_FRAME.size :]) != checksum:\n", "    if False:\n"),
    ("damage is an exception", "S8.3", LOADER, "                except DamagedValueError as error:\n", "                except KeyError as error:\n"),
    ("the exception of a dead server comes through", "S8.3", GUARD, "        except StoreError as error:\n", "        except KeyError as error:\n"),
    ("each failure is a warning", "S8.3", GUARD, "        if not self._warned:\n", "        if True:\n"),
    ("nobody is told of failures", "S8.3", GUARD, "        if not self._warned:\n", "        if False:\n"),
    ("failures are not counted", "S8.3", GUARD, "        self._counters.add(errors=1)\n", ""),
    ("a store that failed is left alone for good", "S8.3", GUARD, "self._until = time.monotonic() + self._pause", "self._until = time.monotonic() + 1000 * self._pause"),
    ("what cannot be written waits for ever", "S8.3", BUFFER, "        with turn:\n            for key, value in batch.items():\n", "        if not store.status():\n            return\n        with turn:\n            for key, value in batch.items():\n"),
    ("misses count as hits", "S8.3", LOADER, "hits=len(names) - len(missing)", "hits=len(names)"),
    ("bool is stored as int", "S8.5", CODEC, 'bool: lambda value: b"T" if value else b"F"', "bool: _integer"),
    ("a 0-d tensor comes back with one dimension", "S8.5", ARRAYS, "name, tuple(tensor.shape))", "name, tuple(tensor.shape) or (1,))"),
    ("bfloat16 comes back as float16", "S8.5", ARRAYS, "name = str(tensor.dtype)[6:].encode()", 'name = str(tensor.dtype)[6:].replace("bfloat16", "float16").encode()'),
    ("the bits of a NaN are lost", "S8.5", CODEC, "_FLOAT.pack(value),", '_FLOAT.pack(value if value == value else float("nan")),'),
    ("large negative integers lose their sign", "S8.5", CODEC, 'int.from_bytes(view, "little", signed=True)', 'int.from_bytes(view, "little")'),
    ("a tuple comes back as a list", "S8.5", CODEC, '    ord("("): tuple,\n', '    ord("("): list,\n'),
    ("arrays are written as they lie in memory", "S8.5", ARRAYS, "array.tobytes()]", 'array.tobytes("A")]'),
    ("arrays come back in the machine's byte order", "S8.5", ARRAYS, "    dtype = np.dtype(name.decode())\n", '    dtype = np.dtype(name.decode()).newbyteorder("=")\n'),
    ("dicts are pickled", "S8.5", CODEC, "    elif kind is dict:\n", "    elif kind is dict and not value:\n"),
    ("pickle is permitted unless it is refused", "S8.5", LOADER, 'kwargs.get("hosts") is None if allow_pickle is None else bool(allow_pickle)', "True if allow_pickle is None else bool(allow_pickle)"),
    ("pickle is read without permission", "S8.5", CODEC, '        if tag == ord("p") and not allow_pickle:\n', "        if False:\n"),
    ("pickle is written without permission", "S8.5", CODEC, "    if not allow_pickle:\n        raise", "    if allow_pickle is None:\n        raise"),
    ("bare pickles are read", "S8.5", CODEC, '        raise DamagedValueError(f"{data[:8]!r}... is not a cached value of version {VERSION}")\n', "        return pickle.loads(data)\n"),
]  # fmt: skip
