/* What the parts of the program offer each other. */
#ifndef ORACLE_H
#define ORACLE_H

#include <stdbool.h>
#include <stddef.h>

/* floats.c: numbers of the three dtypes that MinMaxUInt8 knows, as float, which is what all of them are computed in (S1). */
typedef enum { FLOAT32, FLOAT16, BFLOAT16 } dtype;
size_t item_size(dtype type);
float load(dtype type, const unsigned char *place); /* from little-endian bytes */
void store(dtype type, unsigned char *place, float value); /* rounded to nearest-even, an infinity beyond the range */
void store_saturated(dtype type, unsigned char *place, float value); /* beyond the range, the largest finite number (S4.3) */
void store_nan(dtype type, unsigned char *place); /* that of S4.4 */

/* minmax_uint8.c: one byte for each number, between its chunk's minimum and maximum (S4). */
size_t block_size(size_t count); /* of a chunk of so many numbers (S4.1) */
void compress_chunk(dtype type, const unsigned char *x, size_t count, unsigned char *block);
void decompress_chunk(dtype type, const unsigned char *block, size_t count, unsigned char *x);

/* json.c: a JSON reader that is just large enough for requests, and memory that is given back all at once. */
typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } json_kind;
typedef struct json {
    json_kind kind;
    double number;
    char *string;
    char *key;           /* of a member of an object, else NULL */
    struct json *first;  /* element or member of an array or object */
    struct json *next;   /* sibling */
} json;
_Noreturn void die(const char *format, ...); /* end the program with a message and exit code 2, as all of these do: */
void *need_memory(size_t size); /* which lives until free_memory */
void free_memory(void);
json *json_parse(const char *text);
const json *json_get(const json *value, const char *key); /* NULL if the object has no such member */
const json *json_need(const json *value, const char *key, json_kind kind);

#endif
