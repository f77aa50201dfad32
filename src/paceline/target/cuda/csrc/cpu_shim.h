// The names of ptx.h on a CPU, so that the kernels are tested where there is no GPU. Every thread of a block is a fiber
// that yields where a warp or block would meet. It checks indices, fragment layouts, masks and barriers: neither speed,
// nor races between blocks, nor the last bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <setjmp.h>
#include <ucontext.h>
#include <vector>

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { u32 x, y; };
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

#define DEVICE inline
#define KERNEL(THREADS, BLOCKS_PER_SM) extern "C" void
#define ARGUMENT(TYPE) const TYPE&
#define INFINITE HUGE_VALF
#define shared_memory (block->memory)

// ---- fibers

struct Meeting { int arrived = 0, round = 0; };
struct Warp {
    Meeting meeting;
    u64 in[32][8], out[32][8];
};
struct Block {
    alignas(16) char memory[232 * 1024];
    Warp warps[32];
    Meeting meeting;
    int threads;
};
struct Fiber {
    ucontext_t start;  // for the first time; then jumps, which need no system call
    jmp_buf at;
    bool started, done;
    std::vector<char> stack;
};
struct Index { int x; };
static Fiber* fiber;
static ucontext_t scheduler;
static jmp_buf scheduler_at;
static Index threadIdx, blockIdx, gridDim, blockDim;
static Block* block;
static std::function<void()> kernel_body;

inline void yield() {
    if (!_setjmp(fiber->at)) _longjmp(scheduler_at, 1);
}
inline void resume(Fiber& f) {
    fiber = &f;
    if (_setjmp(scheduler_at)) return;
    if (f.started) _longjmp(f.at, 1);
    f.started = true;
    swapcontext(&scheduler, &f.start);
}
inline void meet(Meeting& m, int all) {
    const int round = m.round;
    if (++m.arrived == all) {
        m.arrived = 0, m.round++;
        return;
    }
    while (m.round == round) yield();
}
// Every lane puts a value in, then sees what all put in.
template <class T> Warp& exchange(const T& v) {
    static_assert(sizeof v <= sizeof(Warp::in[0]));
    Warp& warp = block->warps[threadIdx.x / 32];
    memcpy(warp.in[threadIdx.x % 32], &v, sizeof v);
    const int round = warp.meeting.round;
    if (++warp.meeting.arrived == 32) {
        warp.meeting.arrived = 0;
        memcpy(warp.out, warp.in, sizeof warp.in);
        warp.meeting.round++;
    } else {
        while (warp.meeting.round == round) yield();
    }
    return warp;
}
template <class T> T of_lane(Warp& warp, int lane) {
    T v;
    memcpy(&v, warp.out[lane & 31], sizeof v);
    return v;
}

static void run_fiber() {
    kernel_body();
    fiber->done = true;
    _longjmp(scheduler_at, 1);
}
inline void run_block(int threads) {
    static Block shared;
    static std::vector<Fiber> fibers(1024);
    shared.threads = threads;
    memset(shared.memory, 0x7F, sizeof shared.memory);  // reading what was never written shows
    for (int i = 0; i < threads; i++) {
        Fiber& f = fibers[i];
        f.started = f.done = false;
        f.stack.resize(64 * 1024);
        getcontext(&f.start);
        f.start.uc_stack.ss_sp = f.stack.data();
        f.start.uc_stack.ss_size = f.stack.size();
        f.start.uc_link = &scheduler;
        makecontext(&f.start, run_fiber, 0);
    }
    block = &shared;
    for (int left = threads; left;)
        for (int i = 0; i < threads; i++) {
            if (fibers[i].done) continue;
            threadIdx = {i};
            resume(fibers[i]);
            left -= fibers[i].done;
        }
}
extern "C" void launch(void (*kernel)(const void*), int grid, int threads, const void* argument) {
    kernel_body = [=] { kernel(argument); };
    gridDim = {grid}, blockDim = {threads};
    for (int b = 0; b < grid; b++) {
        blockIdx = {b};
        run_block(threads);
    }
}

// ---- bits and arithmetic

inline float rsqrtf(float v) { return 1 / std::sqrt(v); }
inline float as_float(u32 bits) { float v; memcpy(&v, &bits, 4); return v; }
inline u32 as_bits(float v) { u32 bits; memcpy(&bits, &v, 4); return bits; }
inline u64 as_bits(double v) { u64 bits; memcpy(&bits, &v, 8); return bits; }
inline double as_double(u64 bits) { double v; memcpy(&v, &bits, 8); return v; }
inline u32 byte_permute(u32 low, u32 high, u32 selector) {
    u32 out = 0;
    for (int i = 0; i < 4; i++) {
        const u32 from = selector >> 4 * i & 7;
        out |= ((from < 4 ? low >> 8 * from : high >> 8 * (from - 4)) & 255) << 8 * i;
    }
    return out;
}
inline u32 byte_permute(u32 v, u32 selector) { return byte_permute(v, 0, selector); }
inline u32 and_or(u32 a, u32 mask, u32 more) { return (a & mask) | more; }
inline u16 to_bf16(float f) { const u32 b = as_bits(f); return (b + 0x7FFF + (b >> 16 & 1)) >> 16; }
inline u32 pack_bf16(float low, float high) { return to_bf16(low) | (u32)to_bf16(high) << 16; }
inline float low_half(u32 v) { return as_float(v << 16); }
inline float high_half(u32 v) { return as_float(v & 0xFFFF0000u); }
inline u32 subtract_bf16x2(u32 a, u32 b) { return pack_bf16(low_half(a) - low_half(b), high_half(a) - high_half(b)); }
inline u32 multiply_bf16x2(u32 a, u32 b) { return pack_bf16(low_half(a) * low_half(b), high_half(a) * high_half(b)); }
inline float half_to_float(u32 v) {
    const float size = (v & 0x7C00) ? std::ldexp(1024.0f + (v & 0x3FF), (int)(v >> 10 & 31) - 25) : std::ldexp((float)(v & 0x3FF), -24);
    return v & 0x8000 ? -size : size;
}
inline float fused(float a, float b, float c) { return std::fma(a, b, c); }
inline float exp2_approx(float v) { return std::exp2(v); }

// ---- warps and blocks

template <class T> T shuffle(T v, int lane) { return of_lane<T>(exchange(v), lane); }
template <class T> T shuffle_xor(T v, int mask) { return of_lane<T>(exchange(v), (threadIdx.x & 31) ^ mask); }
inline u32 warp_ballot(bool v) {
    Warp& warp = exchange<u32>(v);
    u32 all = 0;
    for (int i = 0; i < 32; i++) all |= of_lane<u32>(warp, i) << i;
    return all;
}
inline int lowest_bit(u32 v) { return __builtin_ctz(v); }
inline void sync_block() { meet(block->meeting, block->threads); }
inline void sync_warp() { exchange(0); }

// ---- tensor cores

inline void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    struct Fragments { u32 a[4], b[2]; };
    Warp& warp = exchange(Fragments{{a0, a1, a2, a3}, {b0, b1}});
    const auto of = [&](int lane) { return (const Fragments*)warp.out[lane]; };
    const int lane = threadIdx.x & 31, group = lane >> 2, place = lane & 3;
    for (int i = 0; i < 4; i++) {
        const int lower = i >> 1, column = 2 * place + (i & 1);  // row group + 8 * lower
        float sum = c[i];
        for (int k = 0; k < 16; k += 2) {
            const u32 a = of(group * 4 + (k & 7) / 2)->a[lower + (k >> 3) * 2];
            const u32 b = of(column * 4 + (k & 7) / 2)->b[k >> 3];
            sum += low_half(a) * low_half(b);
            sum += high_half(a) * high_half(b);
        }
        c[i] = sum;
    }
}
inline void mma_from(float* c, const u32* a, uint2 b, const float* begin) {
    for (int i = 0; i < 4; i++) c[i] = begin[i];
    mma(c, a[0], a[1], a[2], a[3], b.x, b.y);
}
inline void load_transposed(u32* v, const void* p) {
    Warp& warp = exchange(p);
    const int lane = threadIdx.x & 31, group = lane >> 2, place = lane & 3;
    for (int m = 0; m < 4; m++) {
        const u16* even = of_lane<const u16*>(warp, m * 8 + 2 * place);
        const u16* odd = of_lane<const u16*>(warp, m * 8 + 2 * place + 1);
        v[m] = even[group] | (u32)odd[group] << 16;
    }
}

// ---- memory

inline void require_aligned(const void* p) { if ((uintptr_t)p % 16) abort(); }
inline void copy_async(void* to, const void* from) { require_aligned(to), require_aligned(from), memcpy(to, from, 16); }
inline void copy_weight_async(void* to, const void* from) { copy_async(to, from); }
inline void copy_or_zero_async(void* to, const void* from, bool copy) {
    if (copy) copy_async(to, from);
    else memset(to, 0, 16);
}
inline void close_copy_group() {}
template <int N> void wait_copy_groups() {}
inline void prefetch_l2(const void*) {}
inline uint4 load_fresh16(const void* p) { require_aligned(p); uint4 v; memcpy(&v, p, 16); return v; }
inline uint4 load_host16(const void* p) { return load_fresh16(p); }
inline float load_fresh(const float* p) { return *p; }
inline int load_fresh(const int* p) { return *p; }
inline u64 load_fresh(const u64* p) { return *p; }
inline float2 load_fresh(const float2* p) { return *p; }
template <int N> void load_fresh_floats(float* v, const float* p) { memcpy(v, p, 4 * N); }
inline void atomic_add(u64* p, u64 v) { *p += v; }
inline void atomic_add(u32* p, u32 v) { *p += v; }
inline void atomic_max(u64* p, u64 v) { *p = v > *p ? v : *p; }
inline u32 take_place(u32* p) { return (*p)++; }
template <class T> void block_add(T* shared, T v) { *shared += v; }
inline u32 arrive(u32* p) { return (*p)++; }
inline void publish(int* p, int v) { *p = v; }
inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}
