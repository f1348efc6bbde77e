// Runs recorded launches in a program of its own, as the sanitizers need it: replay.py writes what this reads.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

using Number = unsigned long long;

extern "C" int emulation_run(const char* kernel, unsigned first, unsigned end, unsigned blocks, unsigned threads, size_t shared,
                             void** arguments, unsigned order, char* error, size_t size);

static FILE* trace;

static Number number() {
    Number value;
    if (fread(&value, sizeof value, 1, trace) != 1) exit(3);
    return value;
}

static std::string bytes() {
    std::string text(number(), '\0');
    if (!text.empty() && fread(&text[0], text.size(), 1, trace) != 1) exit(3);
    return text;
}

struct Buffer {
    char* room;  // as large as the tensor and the bytes before it, so that the end of it is the end of the tensor
    size_t skip, size;
};

int main(int count, char** arguments) {
    if (count != 3 || !(trace = fopen(arguments[1], "rb"))) return 2;
    const unsigned order = static_cast<unsigned>(number());
    std::vector<Buffer> buffers(number());
    for (Buffer& buffer : buffers) {
        buffer.skip = number();
        const std::string content = bytes();
        buffer.size = content.size();
        buffer.room = static_cast<char*>(malloc(buffer.skip + buffer.size));
        memcpy(buffer.room + buffer.skip, content.data(), buffer.size);
    }
    for (Number launches = number(); launches > 0; --launches) {
        const std::string kernel = bytes();
        const Number grid = number(), block = number(), shared = number();
        std::vector<std::string> values(number());
        std::vector<void*> addresses;
        for (std::string& value : values) {
            value = bytes();
            for (Number places = number(); places > 0; --places) {  // where in it addresses belong
                const Number place = number(), buffer = number(), offset = number();
                char* const address = buffers[buffer].room + buffers[buffer].skip + offset;
                memcpy(&value[place], &address, sizeof address);
            }
            addresses.push_back(&value[0]);
        }
        char error[1000];
        if (emulation_run(kernel.c_str(), 0, grid, grid, block, shared, addresses.data(), order, error, sizeof error)) {
            fprintf(stderr, "%s: %s\n", kernel.c_str(), error);
            return 4;
        }
    }
    FILE* const results = fopen(arguments[2], "wb");
    for (const Buffer& buffer : buffers) {
        fwrite(buffer.room + buffer.skip, 1, buffer.size, results);
        free(buffer.room);
    }
    return fclose(results);
}
