// Repeats recorded calls of a shared library on another processor: see emulated.py.
//
// replay LIBRARY SCRIPT OUT        the script is a sequence of
//
//   'b' bytes, data                         memory, 64 bytes aligned; the first is number 0
//   'w' memory, offset, bytes, data         its new content
//   'p' memory, offset, memory, offset      an address that is stored in it
//   'c' result, name's length, name, count, count * (kind, value, offset)
//                                           a call whose result goes to memory; an argument is a number, the address
//                                           of memory, or the number that is stored in memory
//   'o' memory, offset, bytes               goes to OUT
//
// where a letter and all numbers are 64 bits wide.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

using Number = int64_t;
// Arguments are whole numbers and addresses, which all lie in registers of one kind, and beyond eight on the stack.
using Function = Number (*)(Number, Number, Number, Number, Number, Number, Number, Number, Number);
enum Kind : Number { kNumber, kAddress, kStored };

[[noreturn]] void fail(const std::string& why) {
    std::fprintf(stderr, "replay: %s\n", why.c_str());
    std::exit(1);
}

struct Script {
    FILE* file;

    bool read(void* to, size_t bytes) { return std::fread(to, 1, bytes, file) == bytes; }
    Number number() {
        Number n;
        if (!read(&n, sizeof n)) fail("the script ends too early");
        return n;
    }
};

FILE* opened(const char* path, const char* how) {
    FILE* file = std::fopen(path, how);
    if (!file) fail(std::string("cannot open ") + path);
    return file;
}

}  // namespace

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (!library) fail(dlerror());
    Script script{opened(arguments[2], "rb")};
    FILE* out = opened(arguments[3], "wb");
    std::vector<char*> memory;
    auto place = [&] {
        char* start = memory.at((size_t)script.number());
        return start + script.number();
    };
    for (Number step; script.read(&step, sizeof step);) {
        if (step == 'b') {
            const size_t bytes = (size_t)script.number();
            memory.push_back(static_cast<char*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64)));
            if (!script.read(memory.back(), bytes)) fail("the script ends too early");
        } else if (step == 'w') {
            char* to = place();
            const size_t bytes = (size_t)script.number();
            if (!script.read(to, bytes)) fail("the script ends too early");
        } else if (step == 'p') {
            char *at = place(), *address = place();
            std::memcpy(at, &address, sizeof address);
        } else if (step == 'c') {
            char* result = memory.at((size_t)script.number());
            std::string name((size_t)script.number(), ' ');
            if (!script.read(name.data(), name.size())) fail("the script ends too early");
            Number given[9] = {};
            const Number count = script.number();
            for (Number i = 0; i < count; ++i) {
                const Number kind = script.number(), value = script.number(), offset = script.number();
                if (kind == kNumber) given[i] = value;
                else if (kind == kAddress) given[i] = (Number)(memory.at((size_t)value) + offset);
                else std::memcpy(&given[i], memory.at((size_t)value), sizeof(Number));
            }
            Function function;
            void* found = dlsym(library, name.c_str());
            if (!found) fail("no function " + name);
            std::memcpy(&function, &found, sizeof found);
            const Number answer = function(given[0], given[1], given[2], given[3], given[4], given[5], given[6], given[7],
                                           given[8]);
            std::memcpy(result, &answer, sizeof answer);
        } else if (step == 'o') {
            const char* from = place();
            std::fwrite(from, 1, (size_t)script.number(), out);
        } else {
            fail("an unknown step");
        }
    }
    return std::fclose(out);
}
