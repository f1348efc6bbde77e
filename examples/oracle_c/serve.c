/* Answers requests of bagua_ref, each a line of JSON: the codec MinMaxUInt8 and two kernels. */
#define _POSIX_C_SOURCE 200809L /* getline */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "oracle.h"

typedef struct {
    const char *dtype;
    unsigned char *data;
    size_t elements, size;
} tensor;

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/* Return what a request's base64 stands for, and how many bytes it is. */
static unsigned char *from_base64(const char *text, size_t *size) {
    unsigned char *data = need_memory(strlen(text) / 4 * 3 + 3);
    uint32_t bits = 0;
    int have = 0;
    *size = 0;
    for (; *text && *text != '='; text++) {
        const char *digit = strchr(digits, *text);
        if (!digit) die("%.20s is no base64", text);
        bits = bits << 6 | (uint32_t)(digit - digits);
        if ((have += 6) >= 8) data[(*size)++] = (unsigned char)(bits >> (have -= 8));
    }
    return data;
}

static void print_base64(const unsigned char *data, size_t size) {
    for (size_t at = 0; at < size; at += 3) {
        size_t left = size - at;
        uint32_t bits = (uint32_t)data[at] << 16 | (left > 1 ? (uint32_t)data[at + 1] << 8 : 0) | (left > 2 ? data[at + 2] : 0);
        putchar(digits[bits >> 18]);
        putchar(digits[bits >> 12 & 63]);
        putchar(left > 1 ? digits[bits >> 6 & 63] : '=');
        putchar(left > 2 ? digits[bits & 63] : '=');
    }
}

static dtype type_of(const char *name) {
    if (strcmp(name, "float32") == 0) return FLOAT32;
    if (strcmp(name, "float16") == 0) return FLOAT16;
    if (strcmp(name, "bfloat16") == 0) return BFLOAT16;
    die("there are no %s here", name);
}

static size_t size_of(const char *dtype) {
    return strcmp(dtype, "uint8") == 0 ? 1 : item_size(type_of(dtype));
}

static size_t count_of(const json *request, const char *name) {
    double number = json_need(request, name, JSON_NUMBER)->number;
    if (!(number >= 0 && number <= 1e12)) die("%s is %g", name, number);
    return (size_t)number;
}

static tensor find(const json *request, const char *name) {
    const json *entry = json_need(json_need(request, "tensors", JSON_OBJECT), name, JSON_OBJECT);
    tensor t = {json_need(entry, "dtype", JSON_STRING)->string, NULL, 0, 0};
    t.data = from_base64(json_need(entry, "data", JSON_STRING)->string, &t.size);
    t.elements = t.size / size_of(t.dtype);
    return t;
}

static tensor made(const char *dtype, size_t elements) {
    size_t size = elements * size_of(dtype);
    return (tensor){dtype, need_memory(size), elements, size};
}

static void answer(const char *name, tensor t) {
    printf(",\"tensors\":{\"%s\":{\"dtype\":\"%s\",\"shape\":[%zu],\"data\":\"", name, t.dtype, t.elements);
    print_base64(t.data, t.size);
    printf("\"}}");
}

static void compress(const json *request) {
    tensor x = find(request, "x");
    dtype type = type_of(x.dtype);
    size_t chunks = count_of(request, "num_chunks"), count = x.elements / chunks, size = block_size(count), first = 0, last = chunks;
    tensor payload = made("uint8", chunks * size);
    if (json_get(request, "target_chunk")) { /* one chunk alone, the other blocks stay (S4.5) */
        payload = find(request, "payload");
        first = count_of(request, "target_chunk");
        last = first + 1;
    }
    for (size_t i = first; i < last; i++) compress_chunk(type, x.data + i * count * item_size(type), count, payload.data + i * size);
    answer("payload", payload);
}

static void decompress(const json *request) {
    tensor payload = find(request, "payload");
    tensor x = made(json_need(request, "dtype", JSON_STRING)->string, count_of(request, "num_elements"));
    dtype type = type_of(x.dtype);
    size_t chunks = count_of(request, "num_chunks"), count = x.elements / chunks;
    for (size_t i = 0; i < chunks; i++)
        decompress_chunk(type, payload.data + i * block_size(count), count, x.data + i * count * item_size(type));
    answer("x", x);
}

/* x + y, or x + f * y, each operation rounded to float32 and the result to the dtype (S1). */
static void add(const json *request, bool scaled) {
    tensor x = find(request, "x"), y = find(request, "y");
    dtype type = type_of(x.dtype);
    float factor = scaled ? (float)json_need(request, "factor", JSON_NUMBER)->number : 1;
    for (size_t at = 0; at < x.size; at += item_size(type)) {
        volatile float product = scaled ? factor * load(type, y.data + at) : load(type, y.data + at);
        store(type, x.data + at, load(type, x.data + at) + product);
    }
    answer("x", x);
}

/* Print the members that follow the id. */
static void reply(const json *request) {
    const char *call = json_need(request, "call", JSON_STRING)->string, *suite = strchr(call, '/');
    if (suite) call = suite + 1; /* a golden vector, whose call is SUITE/OPERATION */
    const json *codec = json_get(request, "codec"), *type = json_get(request, "dtype");
    bool known = !codec || (codec->kind == JSON_STRING && strcmp(codec->string, "MinMaxUInt8") == 0);
    known = known && !(type && type->kind == JSON_STRING && strcmp(type->string, "float64") == 0);
    if (strcmp(call, "hello") == 0)
        printf(",\"protocol\":2,\"name\":\"oracle_c\",\"kernels\":[\"add\",\"add_scaled\"],\"codecs\":[\"MinMaxUInt8\"],"
               "\"dtypes\":[\"float16\",\"bfloat16\",\"float32\"]");
    else if (known && strcmp(call, "payload_bytes") == 0) printf(",\"value\":%zu", block_size(count_of(request, "num_elements")));
    else if (known && strcmp(call, "compress") == 0) compress(request);
    else if (known && strcmp(call, "decompress") == 0) decompress(request);
    else if (known && strcmp(call, "add") == 0) add(request, false);
    else if (known && strcmp(call, "add_scaled") == 0) add(request, true);
    else printf(",\"error\":\"there is no such %s here\"", call);
}

int main(void) {
    char *line = NULL;
    size_t room = 0;
    while (getline(&line, &room, stdin) > 0) {
        const json *request = json_parse(line);
        printf("{\"id\":%zu", count_of(request, "id"));
        reply(request);
        printf("}\n");
        if (fflush(stdout) != 0) die("nobody reads the answers");
        free_memory();
    }
    free(line);
    return 0;
}
