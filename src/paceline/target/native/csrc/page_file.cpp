// Pages of the disk tier, read into the KV cache by the threads of the pass: page_file.py describes the file.
//
// A page goes from the system's memory to its place at once, some hundred kilobytes at a time, and is checked while
// they are in the processor's cache.
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "threads.h"

namespace {

constexpr uint64_t kP1 = 0x9E3779B185EBCA87, kP2 = 0xC2B2AE3D27D4EB4F, kP3 = 0x165667B19E3779F9,
                   kP4 = 0x85EBCA77C2B2AE63, kP5 = 0x27D4EB2F165667C5;

uint64_t rotate(uint64_t x, int by) { return x << by | x >> (64 - by); }

template <class T>
T load(const uint8_t* from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

uint64_t mix(uint64_t lane, uint64_t input) { return rotate(lane + input * kP2, 31) * kP1; }

uint64_t merge(uint64_t hash, uint64_t lane) { return (hash ^ mix(0, lane)) * kP1 + kP4; }

// XXH64 (Yann Collet's xxHash, 64 bits): each step is a bijection of the state for a fixed input and of the input for
// a fixed state, so a change within one 8-byte word always changes the hash.
struct Xxh64 {
    uint64_t a, b, c, d, seed;
    int64_t count = 0;

    explicit Xxh64(uint64_t seed) : a(seed + kP1 + kP2), b(seed + kP2), c(seed), d(seed - kP1), seed(seed) {}

    // As many whole stripes of 32 bytes as there are; gives what follows them.
    const uint8_t* stripes(const uint8_t* at, const uint8_t* end) {
        count += (end - at) / 32 * 32;
        for (; end - at >= 32; at += 32) {
            a = mix(a, load<uint64_t>(at));
            b = mix(b, load<uint64_t>(at + 8));
            c = mix(c, load<uint64_t>(at + 16));
            d = mix(d, load<uint64_t>(at + 24));
        }
        return at;
    }

    // The hash, with the last bytes, which are no whole stripe.
    uint64_t finish(const uint8_t* at, const uint8_t* end) {
        uint64_t hash = seed + kP5;
        if (count) {
            hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
            hash = merge(merge(merge(merge(hash, a), b), c), d);
        }
        hash += (uint64_t)(count + (end - at));
        for (; end - at >= 8; at += 8) hash = rotate(hash ^ mix(0, load<uint64_t>(at)), 27) * kP1 + kP4;
        for (; end - at >= 4; at += 4) hash = rotate(hash ^ load<uint32_t>(at) * kP1, 23) * kP2 + kP3;
        for (; at < end; ++at) hash = rotate(hash ^ *at * kP5, 11) * kP1;
        hash = (hash ^ hash >> 33) * kP2;
        hash = (hash ^ hash >> 29) * kP3;
        return hash ^ hash >> 32;
    }
};

constexpr int kParts = 2;  // keys, values
constexpr int kRunsAtOnce = 64;
constexpr int64_t kBytesAtOnce = 128 << 10;

// Runs of equal length at equal distances. bytes: of a run, a multiple of 32.
struct Runs {
    uint8_t* at;
    int64_t count, stride, bytes;
};

enum Status : int32_t { kWhole, kDamaged, kMissing, kFailed };  // PageStatus of page_file.py

struct Page {
    const char* path;
    const uint8_t* header;  // as it must be, but for the checksum
    int32_t header_bytes, checksum_at;
    Runs parts[kParts];
    int32_t status, reserved;
};

// Fills all buffers from `offset` on; 0 on success, -1 if the file is too short, else errno.
int read_all(int file, iovec* buffers, int count, off_t& offset) {
    while (count) {
        const ssize_t done = preadv(file, buffers, count, offset);
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return done < 0 ? errno : -1;
        offset += done;
        size_t left = (size_t)done;
        for (; count && left >= buffers->iov_len; ++buffers, --count) left -= buffers->iov_len;
        if (count) {
            buffers->iov_base = (uint8_t*)buffers->iov_base + left;
            buffers->iov_len -= left;
        }
    }
    return 0;
}

Status failure(int error) { return error < 0 ? kDamaged : kFailed; }

Status read_rows(int file, const Page& page, Xxh64& hash) {
    off_t offset = page.header_bytes;
    for (const Runs& part : page.parts) {
        const int64_t at_once = std::clamp<int64_t>(kBytesAtOnce / part.bytes, 1, kRunsAtOnce);
        for (int64_t run = 0; run < part.count; run += at_once) {
            const int count = (int)std::min(at_once, part.count - run);
            iovec buffers[kRunsAtOnce];
            for (int i = 0; i < count; ++i) buffers[i] = {part.at + (run + i) * part.stride, (size_t)part.bytes};
            if (const int error = read_all(file, buffers, count, offset)) return failure(error);
            for (int i = 0; i < count; ++i) {
                const uint8_t* at = part.at + (run + i) * part.stride;
                hash.stripes(at, at + part.bytes);
            }
        }
    }
    return kWhole;
}

Status read_file(int file, const Page& page) {
    int64_t size = page.header_bytes;
    for (const Runs& part : page.parts) size += part.count * part.bytes;
    struct stat state;
    if (fstat(file, &state)) return kFailed;
    if (!S_ISREG(state.st_mode) || state.st_size != size || state.st_uid != geteuid()) return kDamaged;
    uint8_t header[256];
    iovec buffer{header, (size_t)page.header_bytes};
    off_t offset = 0;
    if (const int error = read_all(file, &buffer, 1, offset)) return failure(error);
    const int at = page.checksum_at, after = at + 8;
    if (std::memcmp(header, page.header, at) ||
        std::memcmp(header + after, page.header + after, page.header_bytes - after))
        return kDamaged;
    Xxh64 hash(0);
    if (const Status status = read_rows(file, page, hash)) return status;
    return hash.finish(nullptr, nullptr) == load<uint64_t>(header + at) ? kWhole : kDamaged;
}

void read_page(Page& page) {
    const int file = open(page.path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (file >= 0) {
        page.status = read_file(file, page);
        close(file);
    } else {
        page.status = errno == ENOENT ? kMissing : kFailed;
    }
    if (page.status == kWhole) return;
    for (const Runs& part : page.parts)  // nothing stays that is not a row: a reader may look past the last one
        for (int64_t run = 0; run < part.count; ++run) std::memset(part.at + run * part.stride, 0, part.bytes);
}

struct Job {
    Page* pages;
    int count;
};

}  // namespace

extern "C" uint64_t paceline_xxh64(const uint8_t* at, int64_t count, uint64_t seed) {
    Xxh64 hash(seed);
    return hash.finish(hash.stripes(at, at + count), at + count);
}

extern "C" int32_t paceline_page_layout() { return sizeof(Page); }

// Sets the status of each page. The rows of one that is not whole are zeros.
extern "C" void paceline_read_pages(ThreadPool* pool, Page* pages, int32_t count) {
    Job job{pages, count};
    pool->run(
        [](void* context, ThreadPool& members, int) {
            const Job& all = *static_cast<Job*>(context);
            for (int i; (i = members.take_one(all.count)) < all.count;) read_page(all.pages[i]);
        },
        &job);
}
