/* Answers the requests of `bagua-ref verify --command ./serve`: the codec MinMaxUInt8 and two kernels. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"
#include "memory.h"
#include "minmax_uint8.h"

enum { LONGEST_LINE = 1 << 20 };

typedef struct {
    const char *dtype;
    unsigned char *data;
    size_t elements, size;
} tensor;

static dtype type_of(const char *name) {
    if (strcmp(name, "float32") == 0) return FLOAT32;
    if (strcmp(name, "float16") == 0) return FLOAT16;
    if (strcmp(name, "bfloat16") == 0) return BFLOAT16;
    die("there are no %s here", name);
}

static size_t count_of(const json *request, const char *name) {
    double number = json_need(request, name, JSON_NUMBER)->number;
    if (!(number >= 0 && number <= 1e12)) die("%s is %g", name, number);
    return (size_t)number;
}

static tensor find(const json *request, const tensor *tensors, const char *name) {
    size_t place = 0;
    for (const json *t = json_need(request, "tensors", JSON_ARRAY)->first; t; t = t->next, place++)
        if (strcmp(json_need(t, "name", JSON_STRING)->string, name) == 0) return tensors[place];
    die("the request has no tensor %s", name);
}

/* Read the bytes of the tensors that the request lists, in its order. */
static tensor *read_tensors(const json *request) {
    const json *list = json_need(request, "tensors", JSON_ARRAY);
    tensor *tensors = need_memory(list->length * sizeof *tensors);
    size_t place = 0;
    for (const json *t = list->first; t; t = t->next) {
        const char *name = json_need(t, "dtype", JSON_STRING)->string;
        size_t elements = 1;
        for (const json *n = json_need(t, "shape", JSON_ARRAY)->first; n; n = n->next) elements *= (size_t)n->number;
        size_t size = elements * (strcmp(name, "uint8") == 0 ? 1 : item_size(type_of(name)));
        tensors[place] = (tensor){name, need_memory(size), elements, size};
        if (fread(tensors[place++].data, 1, size, stdin) != size) die("the request ends early");
    }
    return tensors;
}

static void answer(const char *name, tensor t) {
    printf("{\"tensors\":[{\"name\":\"%s\",\"dtype\":\"%s\",\"shape\":[%zu]}]}\n", name, t.dtype, t.elements);
    fwrite(t.data, 1, t.size, stdout);
}

static void compress(const json *request, const tensor *tensors) {
    tensor x = find(request, tensors, "x");
    dtype type = type_of(x.dtype);
    size_t chunks = count_of(request, "num_chunks"), count = x.elements / chunks, size = block_size(count);
    const json *target = json_get(request, "target_chunk");
    if (target && target->kind == JSON_NUMBER) { /* one chunk alone, the other blocks stay (S4.5) */
        tensor payload = find(request, tensors, "payload");
        size_t place = count_of(request, "target_chunk");
        compress_chunk(type, x.data + place * count * item_size(type), count, payload.data + place * size);
        answer("payload", payload);
        return;
    }
    tensor payload = {"uint8", need_memory(chunks * size), chunks * size, chunks * size};
    for (size_t i = 0; i < chunks; i++) compress_chunk(type, x.data + i * count * item_size(type), count, payload.data + i * size);
    answer("payload", payload);
}

static void decompress(const json *request, const tensor *tensors) {
    tensor payload = find(request, tensors, "payload"), x;
    x.dtype = json_need(request, "dtype", JSON_STRING)->string;
    dtype type = type_of(x.dtype);
    x.elements = count_of(request, "elements");
    x.size = x.elements * item_size(type);
    x.data = need_memory(x.size);
    size_t chunks = count_of(request, "num_chunks"), count = x.elements / chunks;
    for (size_t i = 0; i < chunks; i++)
        decompress_chunk(type, payload.data + i * block_size(count), count, x.data + i * count * item_size(type));
    answer("x", x);
}

/* x + y, or x + f * y, each operation rounded to float32 and the result to the dtype (S1). */
static void add(const json *request, const tensor *tensors, bool scaled) {
    tensor x = find(request, tensors, "x"), y = find(request, tensors, "y");
    dtype type = type_of(x.dtype);
    float factor = scaled ? (float)json_need(request, "factor", JSON_NUMBER)->number : 1;
    for (size_t at = 0; at < x.size; at += item_size(type)) {
        volatile float product = scaled ? factor * load(type, y.data + at) : load(type, y.data + at);
        store(type, x.data + at, load(type, x.data + at) + product);
    }
    answer("x", x);
}

int main(void) {
    char *line = malloc(LONGEST_LINE);
    while (line && fgets(line, LONGEST_LINE, stdin)) {
        const json *request = json_parse(line);
        if (!request) die("this is no request: %.100s", line);
        const char *call = json_need(request, "call", JSON_STRING)->string;
        const tensor *tensors = read_tensors(request);
        if (strcmp(call, "hello") == 0)
            printf("{\"protocol\":1,\"name\":\"oracle_c\",\"kernels\":[\"add\",\"add_scaled\"],\"codecs\":[\"MinMaxUInt8\"],"
                   "\"dtypes\":[\"float16\",\"bfloat16\",\"float32\"],\"tensors\":[]}\n");
        else if (strcmp(call, "payload_bytes") == 0)
            printf("{\"value\":%zu,\"tensors\":[]}\n", block_size(count_of(request, "elements")));
        else if (strcmp(call, "compress") == 0) compress(request, tensors);
        else if (strcmp(call, "decompress") == 0) decompress(request, tensors);
        else if (strcmp(call, "add") == 0) add(request, tensors, false);
        else if (strcmp(call, "add_scaled") == 0) add(request, tensors, true);
        else printf("{\"error\":\"there is no %s here\",\"tensors\":[]}\n", call);
        if (fflush(stdout) != 0) die("nobody reads the answers");
        free_memory();
    }
    free(line);
    return 0;
}
