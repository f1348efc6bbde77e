/* What every file here needs: memory or the end of the program, and whole files. */
#ifndef MEMORY_H
#define MEMORY_H

#include <stddef.h>

/* Say why on stderr and end the program with exit code 2. */
_Noreturn void die(const char *format, ...);

void *need_memory(size_t size);

/* Free all that need_memory has returned. */
void free_memory(void);

/* Return a file's bytes, with a NUL behind them that does not count. */
char *read_file(const char *folder, const char *name, size_t *size);

#endif
