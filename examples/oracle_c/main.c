/* Answers the golden vectors of bagua_ref that it knows the operations of: oracle VECTORS OUTPUTS. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "memory.h"
#include "minmax_uint8.h"
#include "safetensors.h"
#include "shift_one.h"

static output *first_output, **last_output = &first_output;

/* Return what the files call a case's tensor. */
static const char *full_name(const json *kase, const char *name) {
    const char *id = json_need(kase, "id", JSON_STRING)->string;
    char *full = need_memory(strlen(id) + strlen(name) + 2);
    sprintf(full, "%s:%s", id, name);
    return full;
}

static unsigned char *give(const json *kase, const char *name, const char *type, size_t rows, size_t elements, size_t size) {
    output *made = need_memory(sizeof *made);
    unsigned char *data = need_memory(size);
    *made = (output){full_name(kase, name), type, data, rows, elements, size, NULL};
    *last_output = made;
    last_output = &made->next;
    return data;
}

/* Return an input's bytes. */
static const unsigned char *input(const json *kase, const tensor_file *file, const char *name, const char *type, size_t *size) {
    return find_tensor(file, full_name(kase, name), type, size);
}

static size_t count_of(const json *parameters, const char *name) {
    double number = json_need(parameters, name, JSON_NUMBER)->number;
    if (!(number >= 0 && number <= 1e12)) die("parameter %s is %g", name, number);
    return (size_t)number;
}

static void compress(dtype type, const unsigned char *x, size_t chunks, size_t count, unsigned char *payload) {
    for (size_t i = 0; i < chunks; i++)
        compress_chunk(type, x + i * count * item_size(type), count, payload + i * block_size(count));
}

static void decompress(dtype type, const unsigned char *payload, size_t chunks, size_t count, unsigned char *x) {
    for (size_t i = 0; i < chunks; i++)
        decompress_chunk(type, payload + i * block_size(count), count, x + i * count * item_size(type));
}

static void answer_codec(const json *kase, const char *operation, const tensor_file *file) {
    const char *name = json_need(kase, "dtype", JSON_STRING)->string;
    dtype type = strcmp(name, "float32") == 0 ? FLOAT32 : strcmp(name, "float16") == 0 ? FLOAT16 : BFLOAT16;
    const char *code = type == FLOAT32 ? "F32" : type == FLOAT16 ? "F16" : "BF16";
    const json *parameters = json_need(kase, "parameters", JSON_OBJECT);
    size_t chunks = count_of(parameters, "num_chunks"), size;
    if (chunks == 0) die("num_chunks is 0");
    if (strcmp(operation, "decompress") == 0) {
        size_t elements = count_of(parameters, "num_elements");
        const unsigned char *payload = input(kase, file, "payload", "U8", &size);
        if (elements % chunks || size != chunks * block_size(elements / chunks)) die("a payload has %zu bytes", size);
        decompress(type, payload, chunks, elements / chunks, give(kase, "x", code, 0, elements, elements * item_size(type)));
        return;
    }
    const unsigned char *x = input(kase, file, "x", code, &size);
    size_t elements = size / item_size(type), count = elements / chunks, bytes = chunks * block_size(count);
    if (elements % chunks) die("%zu elements are not %zu equal chunks", elements, chunks);
    unsigned char *payload = give(kase, "payload", "U8", 0, bytes, bytes);
    const json *target = json_get(parameters, "target_chunk");
    if (target && target->kind == JSON_NUMBER) { /* one chunk alone, the other blocks stay (S4.5) */
        size_t place = count_of(parameters, "target_chunk");
        const unsigned char *before = input(kase, file, "payload", "U8", &size);
        if (size != bytes || place >= chunks) die("there is no chunk %zu of %zu in %zu bytes", place, chunks, size);
        memcpy(payload, before, bytes);
        compress_chunk(type, x + place * count * item_size(type), count, payload + place * block_size(count));
        return;
    }
    compress(type, x, chunks, count, payload);
}

static int64_t load_int64(const unsigned char *place) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--) value = value << 8 | place[i];
    return (int64_t)value;
}

static void answer_peers(const json *kase, const tensor_file *file) {
    size_t size, more;
    const unsigned char *ranks = input(kase, file, "rank", "I64", &size), *steps = input(kase, file, "step", "I64", &more);
    int64_t nranks = (int64_t)count_of(json_need(kase, "parameters", JSON_OBJECT), "nranks");
    if (nranks < 2 || nranks % 2) die("shift_one pairs an even number of ranks");
    unsigned char *peers = give(kase, "peer", "I64", size / 8, more / 8, size * more / 8);
    for (size_t r = 0; r < size; r += 8)
        for (size_t s = 0; s < more; s += 8) {
            uint64_t peer = (uint64_t)shift_one_peer(load_int64(ranks + r), nranks, load_int64(steps + s));
            for (int i = 0; i < 8; i++) *peers++ = (unsigned char)(peer >> (8 * i));
        }
}

/* Return whether a case is of the codec here. */
static bool is_minmax(const json *kase) {
    if (strcmp(json_need(kase, "suite", JSON_STRING)->string, "codecs") != 0) return false;
    return strcmp(json_need(json_need(kase, "parameters", JSON_OBJECT), "codec", JSON_STRING)->string, "MinMaxUInt8") == 0;
}

int main(int argc, char **argv) {
    if (argc != 3) die("usage: %s VECTORS OUTPUTS", argv[0]);
    size_t size, answered = 0, left = 0;
    json *manifest = json_parse(read_file(argv[1], "manifest.json", &size));
    if (!manifest) die("%s/manifest.json is no JSON", argv[1]);
    const char *version = json_need(manifest, "vectors_version", JSON_STRING)->string;
    if (strcmp(version, "3") != 0) die("this program knows version 3 only");
    tensor_file *codec = open_tensors(argv[1], "codecs.inputs.safetensors");
    tensor_file *peers = open_tensors(argv[1], "comm_ops.inputs.safetensors");
    for (const json *kase = json_need(manifest, "cases", JSON_ARRAY)->first; kase; kase = kase->next) {
        const char *operation = json_need(kase, "operation", JSON_STRING)->string;
        bool is_codec = is_minmax(kase), is_peers = strcmp(operation, "shift_one_peer") == 0;
        if (is_codec) answer_codec(kase, operation, codec);
        if (is_peers) answer_peers(kase, peers);
        if (is_codec || is_peers) answered++;
        else left++;
    }
    write_tensors(argv[2], "outputs.safetensors", first_output);
    printf("%zu cases answered, %zu are of other operations\n", answered, left);
    return 0;
}
