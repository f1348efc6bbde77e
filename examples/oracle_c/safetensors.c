#include "safetensors.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "memory.h"

tensor_file *open_tensors(const char *folder, const char *name) {
    size_t size;
    char *bytes = read_file(folder, name, &size);
    uint64_t length = 0;
    if (size >= 8)
        for (int i = 7; i >= 0; i--) length = length << 8 | (unsigned char)bytes[i];
    if (size < 8 || length > size - 8) die("%s/%s is truncated, or no safetensors file", folder, name);
    char *header = need_memory((size_t)length + 1);
    memcpy(header, bytes + 8, (size_t)length);
    header[length] = '\0';
    tensor_file *file = need_memory(sizeof *file);
    file->header = json_parse(header);
    if (!file->header) die("%s/%s is no safetensors file", folder, name);
    file->data = (unsigned char *)bytes + 8 + length;
    file->size = size - 8 - (size_t)length;
    return file;
}

const unsigned char *find_tensor(const tensor_file *file, const char *name, const char *dtype, size_t *size) {
    const json *entry = json_get(file->header, name);
    if (!entry) die("there is no tensor %s", name);
    if (strcmp(json_need(entry, "dtype", JSON_STRING)->string, dtype) != 0) die("tensor %s is not %s", name, dtype);
    const json *offsets = json_need(entry, "data_offsets", JSON_ARRAY);
    if (offsets->length != 2 || offsets->first->kind != JSON_NUMBER || offsets->first->next->kind != JSON_NUMBER)
        die("tensor %s has no place", name);
    double start = offsets->first->number, end = offsets->first->next->number;
    if (!(start >= 0 && start <= end && end <= (double)file->size)) die("tensor %s lies outside its file", name);
    *size = (size_t)(end - start);
    return file->data + (size_t)start;
}

/* Print the header, and return its length; file may be NULL. */
static size_t print_header(FILE *file, const output *outputs) {
    char line[1024];
    size_t length = 0, place = 0;
    for (const output *o = outputs; o; o = o->next) {
        char rows[32] = "";
        if (o->rows) snprintf(rows, sizeof rows, "%zu,", o->rows);
        int printed = snprintf(line, sizeof line, "%c\"%s\":{\"dtype\":\"%s\",\"shape\":[%s%zu],\"data_offsets\":[%zu,%zu]}",
                               o == outputs ? '{' : ',', o->name, o->dtype, rows, o->elements, place, place + o->size);
        if (printed < 0 || (size_t)printed >= sizeof line) die("the name %s is too long", o->name);
        if (file) fputs(line, file);
        length += (size_t)printed;
        place += o->size;
    }
    if (file) fputs(outputs ? "}" : "{}", file);
    return length + (outputs ? 1 : 2);
}

void write_tensors(const char *folder, const char *name, const output *outputs) {
    char *path = need_memory(strlen(folder) + strlen(name) + 2);
    sprintf(path, "%s/%s", folder, name);
    FILE *file = fopen(path, "wb");
    if (!file) die("%s: %s", path, strerror(errno));
    size_t length = print_header(NULL, outputs), padded = (length + 7) / 8 * 8;
    for (int i = 0; i < 8; i++) fputc((int)(padded >> (8 * i) & 0xFF), file);
    print_header(file, outputs);
    for (; length < padded; length++) fputc(' ', file);
    for (const output *o = outputs; o; o = o->next) fwrite(o->data, 1, o->size, file);
    if (ferror(file) || fclose(file) != 0) die("%s: cannot be written", path);
}
