/* A JSON reader that is just large enough for manifests and safetensors headers. */
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
    size_t length;       /* elements or members */
} json;

/* Parse text, which ends with a NUL; returns NULL and says why on stderr where it is no JSON. Nothing is ever freed. */
json *json_parse(const char *text);

/* Return the member of an object; NULL if value is no object or has no such member. */
const json *json_get(const json *value, const char *key);

/* The same, but end the program where there is no such member of this kind. */
const json *json_need(const json *value, const char *key, json_kind kind);

#endif
