// The GPU as the kernels see it: types, launch macros, and one function for each instruction that C++ has no word for.
// No CUDA header is included, so NVRTC alone can build the kernels. cpu_shim.h offers the same names on a CPU.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define KERNEL(THREADS, BLOCKS_PER_SM) extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
#define ARGUMENT(TYPE) const __grid_constant__ TYPE
#define INFINITE __int_as_float(0x7F800000)
extern __shared__ __align__(16) char shared_memory[];

// ---- bits and arithmetic

DEVICE float as_float(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 as_bits(float v) { return __float_as_uint(v); }
DEVICE u64 as_bits(double v) { return (u64)__double_as_longlong(v); }
DEVICE double as_double(u64 bits) { return __longlong_as_double((long long)bits); }
DEVICE u32 byte_permute(u32 v, u32 selector) { return __byte_perm(v, 0, selector); }
DEVICE u32 byte_permute(u32 low, u32 high, u32 selector) { return __byte_perm(low, high, selector); }

// (a & mask) | more in one instruction; masks stay in registers, as immediates they would cost one more each.
DEVICE u32 and_or(u32 a, u32 mask, u32 more) {
    u32 v;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(v) : "r"(a), "r"(mask), "r"(more));
    return v;
}
DEVICE u16 to_bf16(float f) {
    u16 v;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(f));
    return v;
}
DEVICE u32 pack_bf16(float low, float high) {
    u32 v;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
    return v;
}
DEVICE u32 subtract_bf16x2(u32 a, u32 b) {  // a - b as b * -1 + a, which GPUs before Hopper have too
    u32 v;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(b), "r"(0xBF80BF80u), "r"(a));
    return v;
}
DEVICE u32 multiply_bf16x2(u32 a, u32 b) {  // a * b as a * b - 0
    u32 v;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(0x80008000u));
    return v;
}
DEVICE float half_to_float(u32 low_half) {  // of float16
    float v;
    asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"((u16)low_half));
    return v;
}
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }  // a * b + c, rounded once
DEVICE float exp2_approx(float v) {
    asm("ex2.approx.ftz.f32 %0, %0;" : "+f"(v));
    return v;
}

// ---- warps and blocks

template <class T> DEVICE T shuffle(T v, int lane) { return __shfl_sync(~0u, v, lane); }
template <class T> DEVICE T shuffle_xor(T v, int mask) { return __shfl_xor_sync(~0u, v, mask); }
DEVICE u32 warp_ballot(bool v) { return __ballot_sync(~0u, v); }
DEVICE int lowest_bit(u32 v) { return __ffs(v) - 1; }
DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

// ---- tensor cores

// c[16 x 8] += a[16 x 16] * b[16 x 8], bf16 in, float32 sums. Not volatile: that would pin the order and cost latency.
DEVICE void mma(float* c, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// The same with sums that begin elsewhere, in registers that stay.
DEVICE void mma_from(float* c, const u32* a, uint2 b, const float* begin) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "f"(begin[0]), "f"(begin[1]), "f"(begin[2]),
          "f"(begin[3]));
}
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE void load_transposed(u32* v, const void* p) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(shared_address(p))
                 : "memory");
}

// ---- memory

// Asynchronous copies of 16 bytes into shared memory, past the first-level cache. They are closed into groups.
DEVICE void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void copy_weight_async(void* to, const void* from) {  // fetches the neighbours into L2 as well
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
DEVICE void copy_or_zero_async(void* to, const void* from, bool copy) {  // where it does not copy, nothing is read
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(copy ? 16 : 0) : "memory");
}
DEVICE void close_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void wait_copy_groups() {  // for all groups but the last N
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}
DEVICE void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// What earlier kernels wrote is read past the first-level cache, which may hold what was there before.
DEVICE uint4 load_fresh16(const void* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE float load_fresh(const float* p) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(p));
    return v;
}
DEVICE int load_fresh(const int* p) {
    int v;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}
DEVICE u64 load_fresh(const u64* p) {
    u64 v;
    asm volatile("ld.global.cg.u64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
}
DEVICE float2 load_fresh(const float2* p) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p));
    return v;
}
template <int N> DEVICE void load_fresh_floats(float* v, const float* p) {
    if constexpr (N == 2)
        asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "l"(p));
    else
        asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3]) : "l"(p));
}
DEVICE uint4 load_host16(const void* p) {  // from pinned memory that the host writes between launches
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}
DEVICE void atomic_add(u64* p, u64 v) {
    asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEVICE void atomic_add(u32* p, u32 v) {
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE void atomic_max(u64* p, u64 v) {
    asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
DEVICE u32 take_place(u32* p) {  // counts, and gives what was counted before
    u32 v;
    asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void block_add(int* shared, int v) { atomicAdd(shared, v); }
DEVICE void block_add(u32* shared, u32 v) { atomicAdd(shared, v); }
DEVICE void block_add(u64* shared, u64 v) { atomicAdd(shared, v); }
// Counts an arrival. Releases what the thread wrote, acquires what earlier arrivals released.
DEVICE u32 arrive(u32* p) {
    u32 v;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void publish(int* p, int v) {  // to the host, after everything written before
    asm volatile("fence.acq_rel.sys;\nst.release.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// ---- programmatic dependent launch (PDL)

#if __CUDA_ARCH__ >= 900
DEVICE void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#else
DEVICE void wait_for_previous_kernel() {}
DEVICE void let_next_kernel_start() {}
#endif
