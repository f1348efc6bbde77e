/* Safetensors files: 8 bytes of header length, a JSON header, the tensors' bytes one after another. All little-endian. */
#ifndef SAFETENSORS_H
#define SAFETENSORS_H

#include <stddef.h>

#include "json.h"

typedef struct {
    json *header;
    const unsigned char *data; /* where data_offsets count from */
    size_t size;
} tensor_file;

tensor_file *open_tensors(const char *folder, const char *name);

/* Return a tensor's bytes and how many they are; ends the program if there is none of this name and dtype ("F32", ...). */
const unsigned char *find_tensor(const tensor_file *file, const char *name, const char *dtype, size_t *size);

/* Outputs are collected and written as one file. They have one dimension, or two if there are rows. */
typedef struct output {
    const char *name, *dtype;
    const void *data;
    size_t rows, elements, size;
    struct output *next;
} output;

void write_tensors(const char *folder, const char *name, const output *outputs);

#endif
