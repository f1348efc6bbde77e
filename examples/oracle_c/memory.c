#include "memory.h"

#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(2);
}

typedef union link {
    union link *next;
    max_align_t aligned;
} link;

static link *taken;

void *need_memory(size_t size) {
    link *memory = malloc(sizeof(link) + size);
    if (!memory) die("no memory for %zu bytes", size);
    memory->next = taken;
    taken = memory;
    return memory + 1;
}

void free_memory(void) {
    while (taken) {
        link *next = taken->next;
        free(taken);
        taken = next;
    }
}

char *read_file(const char *folder, const char *name, size_t *size) {
    char *path = need_memory(strlen(folder) + strlen(name) + 2);
    sprintf(path, "%s/%s", folder, name);
    FILE *file = fopen(path, "rb");
    if (!file) die("%s: %s", path, strerror(errno));
    if (fseek(file, 0, SEEK_END) != 0) die("%s: %s", path, strerror(errno));
    long length = ftell(file);
    if (length < 0) die("%s: %s", path, strerror(errno));
    rewind(file);
    char *data = need_memory((size_t)length + 1);
    if (fread(data, 1, (size_t)length, file) != (size_t)length) die("%s: cannot be read to its end", path);
    data[length] = '\0';
    fclose(file);
    *size = (size_t)length;
    return data;
}
