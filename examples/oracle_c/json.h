/* A JSON reader that is just large enough for requests, and memory that is given back all at once. */
#ifndef JSON_H
#define JSON_H

#include <stdbool.h>
#include <stddef.h>

typedef enum { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } json_kind;

typedef struct json {
    json_kind kind;
    bool boolean;
    double number;
    char *string;
    char *key;           /* of a member of an object, else NULL */
    struct json *first;  /* element or member of an array or object */
    struct json *next;   /* sibling */
} json;

/* Print a message and end the program with exit code 2. */
_Noreturn void die(const char *format, ...);

/* Return memory that lives until free_memory; ends the program where there is none. */
void *need_memory(size_t size);
void free_memory(void);

/* Parse text, which ends with a NUL; ends the program where it is no JSON. */
json *json_parse(const char *text);

/* Return the member of an object; NULL if it has none. */
const json *json_get(const json *value, const char *key);

/* The same, but end the program where there is no such member of this kind. */
const json *json_need(const json *value, const char *key, json_kind kind);

#endif
