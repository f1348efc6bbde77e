#include "oracle.h"

#include <stdarg.h>
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

static const char *skip_space(const char *at) {
    while (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t') at++;
    return at;
}

static void take(const char **at, const char *word) {
    if (strncmp(*at, word, strlen(word)) != 0) die("expected %s in JSON, not %.20s", word, *at);
    *at += strlen(word);
}

/* Escapes stay as they are: requests have none in the strings that matter here. */
static char *read_string(const char **at) {
    take(at, "\"");
    const char *end = *at;
    while (*end && *end != '"') end += (*end == '\\' && end[1]) ? 2 : 1;
    size_t length = (size_t)(end - *at);
    char *string = need_memory(length + 1);
    memcpy(string, *at, length);
    string[length] = '\0';
    *at = end;
    take(at, "\"");
    return string;
}

static json *read_value(const char **at);

static void read_members(const char **at, json *value, char end) {
    json **last = &value->first;
    *at = skip_space(*at + 1);
    while (**at != end) {
        char *key = NULL;
        if (value->first) take(at, ",");
        *at = skip_space(*at);
        if (end == '}') {
            key = read_string(at);
            *at = skip_space(*at);
            take(at, ":");
        }
        *last = read_value(at);
        (*last)->key = key;
        last = &(*last)->next;
        *at = skip_space(*at);
    }
    ++*at;
}

static json *read_value(const char **at) {
    json *value = need_memory(sizeof *value);
    memset(value, 0, sizeof *value);
    *at = skip_space(*at);
    switch (**at) {
        case '{': value->kind = JSON_OBJECT; read_members(at, value, '}'); break;
        case '[': value->kind = JSON_ARRAY; read_members(at, value, ']'); break;
        case '"': value->kind = JSON_STRING; value->string = read_string(at); break;
        case 'n': take(at, "null"); break;
        case 'f': value->kind = JSON_BOOL; take(at, "false"); break;
        case 't': value->kind = JSON_BOOL; take(at, "true"); break;
        default: {
            char *end; /* strtod knows Infinity and NaN, too */
            value->kind = JSON_NUMBER;
            value->number = strtod(*at, &end);
            if (end == *at) die("expected a value in JSON, not %.20s", *at);
            *at = end;
        }
    }
    return value;
}

json *json_parse(const char *text) {
    json *value = read_value(&text);
    if (*skip_space(text)) die("something follows the JSON: %.20s", text);
    return value;
}

const json *json_get(const json *value, const char *key) {
    for (const json *member = value->first; member; member = member->next)
        if (member->key && strcmp(member->key, key) == 0) return member;
    return NULL;
}

const json *json_need(const json *value, const char *key, json_kind kind) {
    const json *member = json_get(value, key);
    if (!member || member->kind != kind) die("a JSON object has no member \"%s\" of the kind that the format says", key);
    return member;
}
