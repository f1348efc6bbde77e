#include "json.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"

enum { DEEPEST = 64 };

typedef struct {
    const char *start, *at;
    const char *error;
} reader;

static json *read_value(reader *r, int depth);

static void skip_space(reader *r) {
    while (*r->at == ' ' || *r->at == '\n' || *r->at == '\r' || *r->at == '\t') r->at++;
}

static json *fail(reader *r, const char *error) {
    if (!r->error) r->error = error;
    return NULL;
}

static bool take(reader *r, const char *word) {
    size_t length = strlen(word);
    if (strncmp(r->at, word, length) != 0) return false;
    r->at += length;
    return true;
}

static unsigned read_hex(reader *r) {
    unsigned value = 0;
    for (int i = 0; i < 4; i++) {
        char c = *r->at;
        unsigned digit;
        if (c >= '0' && c <= '9') digit = (unsigned)(c - '0');
        else if (c >= 'a' && c <= 'f') digit = (unsigned)(c - 'a') + 10;
        else if (c >= 'A' && c <= 'F') digit = (unsigned)(c - 'A') + 10;
        else {
            fail(r, "four hexadecimal digits must follow \\u");
            return 0;
        }
        value = value * 16 + digit;
        r->at++;
    }
    return value;
}

static char *put_utf8(char *out, unsigned code) {
    if (code < 0x80) {
        *out++ = (char)code;
    } else if (code < 0x800) {
        *out++ = (char)(0xC0 | code >> 6);
        *out++ = (char)(0x80 | (code & 0x3F));
    } else if (code < 0x10000) {
        *out++ = (char)(0xE0 | code >> 12);
        *out++ = (char)(0x80 | (code >> 6 & 0x3F));
        *out++ = (char)(0x80 | (code & 0x3F));
    } else {
        *out++ = (char)(0xF0 | code >> 18);
        *out++ = (char)(0x80 | (code >> 12 & 0x3F));
        *out++ = (char)(0x80 | (code >> 6 & 0x3F));
        *out++ = (char)(0x80 | (code & 0x3F));
    }
    return out;
}

static char *read_string(reader *r) {
    if (*r->at != '"') {
        fail(r, "expected a string");
        return NULL;
    }
    const char *end = ++r->at;
    while (*end && *end != '"') end += (*end == '\\' && end[1]) ? 2 : 1;
    char *string = need_memory((size_t)(end - r->at) + 1); /* escapes are longer than what they stand for */
    char *out = string;
    while (*r->at != '"') {
        char c = *r->at;
        if ((unsigned char)c < 0x20) { /* the NUL at the end of the text, too: stay before it */
            fail(r, "a string does not end");
            return NULL;
        }
        r->at++;
        if (c != '\\') {
            *out++ = c;
            continue;
        }
        static const char escapes[] = "\"\\/bfnrt", meanings[] = "\"\\/\b\f\n\r\t";
        c = *r->at;
        const char *found = c ? strchr(escapes, c) : NULL;
        if (found) {
            *out++ = meanings[found - escapes];
            r->at++;
        } else if (take(r, "u")) {
            unsigned code = read_hex(r);
            if (code >= 0xD800 && code < 0xDC00 && take(r, "\\u")) {
                unsigned low = read_hex(r);
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            }
            out = put_utf8(out, code);
        } else {
            fail(r, "unknown escape in a string");
        }
        if (r->error) return NULL;
    }
    r->at++;
    *out = '\0';
    return string;
}

static json *read_members(reader *r, json *value, char end, int depth) {
    json **last = &value->first;
    r->at++;
    skip_space(r);
    if (*r->at == end) {
        r->at++;
        return value;
    }
    for (;;) {
        char *key = NULL;
        if (end == '}') {
            skip_space(r);
            key = read_string(r);
            skip_space(r);
            if (!key || !take(r, ":")) return fail(r, "expected a colon after a member's name");
        }
        json *member = read_value(r, depth + 1);
        if (!member) return NULL;
        member->key = key;
        *last = member;
        last = &member->next;
        value->length++;
        skip_space(r);
        if (*r->at == end) {
            r->at++;
            return value;
        }
        if (!take(r, ",")) return fail(r, "expected a comma or the end of an array or object");
    }
}

static json *read_value(reader *r, int depth) {
    if (depth > DEEPEST) return fail(r, "nested too deep");
    skip_space(r);
    json *value = need_memory(sizeof *value);
    memset(value, 0, sizeof *value);
    if (*r->at == '{' || *r->at == '[') {
        value->kind = *r->at == '{' ? JSON_OBJECT : JSON_ARRAY;
        return read_members(r, value, *r->at == '{' ? '}' : ']', depth);
    }
    if (*r->at == '"') {
        value->kind = JSON_STRING;
        value->string = read_string(r);
        return value->string ? value : NULL;
    }
    if (take(r, "null")) return value;
    value->kind = JSON_BOOL;
    if (take(r, "false")) return value;
    value->boolean = true;
    if (take(r, "true")) return value;
    char *end;
    value->kind = JSON_NUMBER;
    value->number = strtod(r->at, &end);
    if (end == r->at) return fail(r, "expected a value");
    r->at = end;
    return value;
}

json *json_parse(const char *text) {
    reader r = {text, text, NULL};
    json *value = read_value(&r, 0);
    skip_space(&r);
    if (value && *r.at) value = fail(&r, "something follows the value");
    if (!value) fprintf(stderr, "not JSON at byte %zu: %s\n", (size_t)(r.at - r.start), r.error);
    return value;
}

const json *json_get(const json *value, const char *key) {
    if (value->kind != JSON_OBJECT) return NULL;
    for (const json *member = value->first; member; member = member->next)
        if (strcmp(member->key, key) == 0) return member;
    return NULL;
}

const json *json_need(const json *value, const char *key, json_kind kind) {
    const json *member = json_get(value, key);
    if (!member || member->kind != kind) die("a JSON object has no member \"%s\" of the kind that the format says", key);
    return member;
}
