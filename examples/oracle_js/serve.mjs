// Answers requests of bagua_ref, each a line of JSON: kernels and MinMaxUInt8, in float16, bfloat16, float32 and float64.
import { createInterface } from "node:readline";

const view = (bytes) => new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
const scratch = new DataView(new ArrayBuffer(4));
const bitsOf = (value) => (scratch.setFloat32(0, value), scratch.getUint32(0));
const floatOf = (bits) => (scratch.setUint32(0, bits), scratch.getFloat32(0));

function halfOf(value) {
  const bits = bitsOf(value), sign = (bits >>> 16) & 0x8000;
  let magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return 0x7e00; // NaN
  if (magnitude >= 0x47800000) return sign | 0x7c00; // 65536 and above
  if (magnitude < 0x38800000) return sign | rint(floatOf(magnitude) * 2 ** 24); // denormal
  magnitude += 0xfff + ((magnitude >>> 13) & 1); // may carry, up to infinity
  return sign | ((magnitude - 0x38000000) >>> 13);
}

function floatOfHalf(half) {
  const sign = half & 0x8000 ? -1 : 1, exponent = (half >> 10) & 31, fraction = half & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? (1 + fraction / 1024) * 2 ** (exponent - 15) : fraction * 2 ** -24);
}

function bfloatOf(value) {
  const bits = bitsOf(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return (bits + 0x7fff + ((bits >>> 16) & 1)) >>> 16;
}

// Bytes of an element, how to read and write it, and the largest number.
const FORMATS = {
  float16: [2, (v, at) => floatOfHalf(v.getUint16(at, true)), (v, at, x) => v.setUint16(at, halfOf(x), true), 65504],
  bfloat16: [2, (v, at) => floatOf((v.getUint16(at, true) << 16) >>> 0), (v, at, x) => v.setUint16(at, bfloatOf(x), true), (255 / 128) * 2 ** 127],
  float32: [4, (v, at) => v.getFloat32(at, true), (v, at, x) => v.setFloat32(at, x, true), (2 - 2 ** -23) * 2 ** 127],
  float64: [8, (v, at) => v.getFloat64(at, true), (v, at, x) => v.setFloat64(at, x, true), Number.MAX_VALUE],
  uint8: [1, (v, at) => v.getUint8(at), (v, at, x) => v.setUint8(at, x)],
  int8: [1, (v, at) => v.getInt8(at), (v, at, x) => v.setInt8(at, x)],
  int16: [2, (v, at) => v.getInt16(at, true), (v, at, x) => v.setInt16(at, x, true)],
  int32: [4, (v, at) => v.getInt32(at, true), (v, at, x) => v.setInt32(at, x, true)],
  int64: [8, (v, at) => v.getBigInt64(at, true), (v, at, x) => v.setBigInt64(at, BigInt(x), true)],
  bool: [1, (v, at) => v.getUint8(at), (v, at, x) => v.setUint8(at, x)],
};

function unpack({ dtype, shape, data }) {
  const bytes = Buffer.from(data, "base64"), [size, get] = FORMATS[dtype], from = view(bytes);
  return { dtype, shape, x: Array.from({ length: bytes.length / size }, (_, i) => get(from, i * size)) };
}

function pack(dtype, x, shape = [x.length]) {
  const [size, , set] = FORMATS[dtype], bytes = Buffer.alloc(x.length * size), to = view(bytes);
  x.forEach((value, i) => set(to, i * size, value));
  return { dtype, shape, data: bytes.toString("base64") };
}

// The nearest integer, halves to even; infinities, NaN and the sign of zero stay.
function rint(x) {
  const low = Math.floor(x), rest = x - low;
  if (!(Math.abs(x) < 2 ** 52) || rest === 0) return x;
  const found = rest < 0.5 || (rest === 0.5 && low % 2 === 0) ? low : low + 1;
  return found === 0 && x < 0 ? -0 : found;
}

// Every operation rounds to float32 (S1), or to float64.
const rounding = (dtype) => (dtype === "float64" ? (x) => x : Math.fround);
const stored = (dtype, value) => unpack(pack(dtype, [value])).x[0];

const KERNELS = {
  add: (r, { x, y }) => r(x + y),
  subtract: (r, { x, y }) => r(x - y),
  add_scaled: (r, { x, y, factor }) => r(x + r(r(factor) * y)),
  average: (r, { x, y }) => r(r(x + y) / 2),
  divide: (r, { x, divisor }) => r(x / r(divisor)),
  async_average: (r, { x, reduced, snapshot, nranks }) => r(x + r(r(reduced / nranks) - snapshot)),
  update_momentum: (r, { x, grad, beta1, one_minus_beta1 = 1 - beta1 }) => r(r(r(beta1) * x) + r(r(one_minus_beta1) * grad)),
  combine_ring: (r, { x, left, right, weight }, dtype) => {
    for (const [y, factor] of [[left, 1 / 3], [right, 1 / 3], [weight, -5 / 3]]) x = stored(dtype, r(x + r(r(factor) * y)));
    return x;
  },
};

function elementwise(kernel, request, tensors) {
  const { dtype, x } = tensors.x, r = rounding(dtype);
  const result = x.map((_, i) => {
    const given = { ...request };
    for (const name in tensors) given[name] = tensors[name].x[i];
    return kernel(r, given, dtype);
  });
  return { x: pack(dtype, result, tensors.x.shape) };
}

function reduceChunks({ num_chunks, target_chunk, average }, { x: { dtype, x, shape } }) {
  const r = rounding(dtype), size = x.length / num_chunks;
  for (let i = 0; i < size; i++) {
    let total = 0;
    for (let chunk = 0; chunk < num_chunks; chunk++) total = r(total + x[chunk * size + i]);
    // the target is read before it is written
    x[target_chunk * size + i] = average ? r(total / num_chunks) : total;
  }
  return { x: pack(dtype, x, shape) };
}

function gatherFlat(request, tensors) {
  const dtype = Object.values(tensors)[0]?.dtype ?? request.dtype;
  return { flat: pack(dtype, Object.values(tensors).flatMap(({ x }) => x)) };
}

function scatterFlat({ shapes }, { flat: { dtype, x } }) {
  const found = {};
  let place = 0;
  shapes.forEach((shape, i) => {
    const size = shape.reduce((a, b) => a * b, 1);
    found[`t${i}`] = pack(dtype, x.slice(place, (place += size)), shape);
  });
  return found;
}

// Ascending, stable; NaNs last.
function compareKeys(a, b) {
  const nan = (v) => typeof v === "number" && Number.isNaN(v);
  return nan(a) || nan(b) ? nan(a) - nan(b) : a < b ? -1 : a > b ? 1 : 0;
}
const orderOf = (keys) => keys.map((_, i) => i).sort((i, j) => compareKeys(keys[i], keys[j]) || i - j);

// MinMaxUInt8 (S4)

const HEADER = 32, f = Math.fround;
const blockSize = (c) => HEADER + Math.ceil(c / 32) * 32;

function gridBetween(min, max) {
  const scale = f(255 / f(f(max - min) + f(1e-7))), upper = rint(f(max * scale));
  return [scale, upper, f(upper - 255)];
}

function compressChunk(dtype, x) {
  const block = Buffer.alloc(blockSize(x.length)), [size, , set] = FORMATS[dtype], to = view(block);
  if (!x.length) return block;
  const min = x.reduce((a, b) => Math.min(a, b)) + 0, max = x.reduce((a, b) => Math.max(a, b)) + 0; // -0 is written as +0
  const [scale, upper, lower] = gridBetween(min, max);
  const poisoned = ![f(max - min), f(max * scale), f(min * scale)].every(Number.isFinite);
  [min, max].forEach((end, i) => set(to, i * size, poisoned ? NaN : end));
  if (poisoned) return block;
  x.forEach((value, i) => {
    const level = f(Math.min(rint(f(value * scale)), upper) - lower);
    block[HEADER + i] = Math.max(0, Math.min(255, level));
  });
  return block;
}

function decompressChunk(dtype, block, count) {
  const [size, get, , largest] = FORMATS[dtype], from = view(block), min = get(from, 0), max = get(from, size);
  if (Number.isNaN(min) || Number.isNaN(max)) return Array(count).fill(NaN);
  const [scale, , lower] = gridBetween(min, max);
  return Array.from({ length: count }, (_, i) => {
    const value = stored(dtype, f(f(block[HEADER + i] + lower) / scale));
    return Math.max(-largest, Math.min(largest, value));
  });
}

function compress({ num_chunks, target_chunk }, { x: { dtype, x }, payload }) {
  const count = x.length / num_chunks, size = blockSize(count), found = payload ? payload.x : [];
  for (let chunk = 0; chunk < num_chunks; chunk++) {
    if (target_chunk !== undefined && chunk !== target_chunk) continue; // the other blocks stay (S4.5)
    compressChunk(dtype, x.slice(chunk * count, (chunk + 1) * count)).forEach((byte, i) => (found[chunk * size + i] = byte));
  }
  return { payload: pack("uint8", found) };
}

function decompress({ num_chunks, num_elements, dtype }, { payload: { x } }) {
  const count = num_elements / num_chunks, size = blockSize(count), bytes = Uint8Array.from(x), found = [];
  for (let chunk = 0; chunk < num_chunks; chunk++) found.push(...decompressChunk(dtype, bytes.slice(chunk * size, (chunk + 1) * size), count));
  return { x: pack(dtype, found) };
}

// Requests

const CALLS = {
  ...Object.fromEntries(Object.entries(KERNELS).map(([name, kernel]) => [name, (q, t) => elementwise(kernel, q, t)])),
  reduce_chunks: reduceChunks,
  gather_flat: gatherFlat,
  scatter_flat: scatterFlat,
  order_by_complexity: (q, { keys }) => ({ order: pack("int64", orderOf(keys.x)) }),
  compress,
  decompress,
};
const MINE = Object.keys(CALLS).filter((name) => !["compress", "decompress"].includes(name));

function answer(request) {
  const { call, codec } = request, name = call.slice(call.indexOf("/") + 1); // a golden vector's call is SUITE/OPERATION
  if (call === "hello") return { protocol: 2, name: "oracle_js", kernels: MINE, codecs: ["MinMaxUInt8"] };
  if (codec !== undefined && codec !== "MinMaxUInt8") throw new Error(`there is no ${codec} here`);
  if (call === "payload_bytes") return { value: blockSize(request.num_elements) };
  if (!CALLS[name] || /^(comm_ops|samplers|collectives)\//.test(call)) throw new Error(`there is no ${call} here`);
  const tensors = Object.fromEntries(Object.entries(request.tensors).map(([key, packed]) => [key, unpack(packed)]));
  return { tensors: CALLS[name](request, tensors) };
}

for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line.replace(/:\s*(-?)Infinity/g, ": $11e999"));
  let found;
  try {
    found = answer(request);
  } catch (error) {
    found = { error: String(error) };
  }
  process.stdout.write(JSON.stringify({ id: request.id, ...found }) + "\n");
}
