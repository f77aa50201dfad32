// A thread pool whose threads run one job together, meet at barriers and share out work.
//
// A waiting thread spins for a while, then sleeps: a neighbour that needs the core gets it. Between two jobs it
// spins longer, for the next one of a round comes soon, and to wake a thread takes as long as a drafter's layer.
// Before that it prefetches what the next job is expected to read: memory is idle then.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

class Gate {  // a counter that threads wait on until it moves
public:
    explicit Gate(int spins) : spins_(spins) {}

    uint32_t now() const { return count_.load(std::memory_order_acquire); }

    void wait_beyond(uint32_t seen) {
        for (int i = 0; i < spins_; ++i) {
            if (now() != seen) return;
            relax();
        }
        sleepers_.fetch_add(1);
        while (now() == seen) sleep(seen);
        sleepers_.fetch_sub(1);
    }

    void advance() {
        count_.fetch_add(1);
        if (sleepers_.load()) wake();
    }

private:
    static void relax() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
#if defined(__linux__)
    void sleep(uint32_t seen) { syscall(SYS_futex, &count_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0); }
    void wake() { syscall(SYS_futex, &count_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0); }
#else
    void sleep(uint32_t) { std::this_thread::sleep_for(std::chrono::microseconds(20)); }
    void wake() {}
#endif

    const int spins_;
    alignas(64) std::atomic<uint32_t> count_{0};
    std::atomic<int> sleepers_{0};
};

// Contiguous memory.
struct Region {
    const char* begin = nullptr;
    size_t bytes = 0;
};

class ThreadPool {
public:
    using Job = void (*)(void* context, ThreadPool& pool, int member);  // must not throw: the others would wait for ever

    explicit ThreadPool(int size) : size_(size) {
        try {
            for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
        } catch (...) {
            stop();
            throw;
        }
    }
    ~ThreadPool() { stop(); }

    int size() const { return size_; }

    // Every thread runs the job, the caller as number 0. next: what the others prefetch once it is done.
    void run(Job job, void* context, Region next = {}) {
        job_ = job;
        context_ = context;
        prefetch_ = next;
        next_.store(0);
        start_.advance();
        job(context, *this, 0);
        barrier();
    }

    // A draft head that ran before a pass of the target is likely to run again after it. Its weights must stay where
    // they are until another one is expected.
    void expect(Region weights) { expected_ = weights; }
    Region expected() { return std::exchange(expected_, {}); }

    // From its return on no thread prefetches anything, so that all weights may be freed. Jobs may run meanwhile.
    void stop_prefetching() {
        may_prefetch_.store(false);
        while (prefetching_.load()) std::this_thread::yield();
    }

    // Waits for all; what was written before is seen by all after. Shared work starts anew.
    void barrier() {
        uint32_t seen = meet_.now();
        if (arrived_.fetch_add(1) + 1 == size_) {
            arrived_.store(0);
            next_.store(0);
            meet_.advance();
        } else {
            meet_.wait_beyond(seen);
        }
    }

    // Takes the next piece [begin, end) of `total`: this thread's part of what is left (guided self-scheduling, Polychronopoulos and
    // Kuck 1987). So memory is read in long streams, and few cache lines are written by two threads.
    bool take(int total, int& begin, int& end) {
        int at = next_.load(std::memory_order_relaxed), count;
        do {
            if (at >= total) return false;
            count = std::max(1, (total - at) / size_);
        } while (!next_.compare_exchange_weak(at, at + count, std::memory_order_relaxed));
        begin = at;
        end = at + count;
        return true;
    }

    // Takes the next single piece of `total`, or gives `total`.
    int take_one(int total) { return std::min(next_.fetch_add(1, std::memory_order_relaxed), total); }

private:
    void stop() {
        stopping_ = true;
        start_.advance();
        for (std::thread& t : threads_) t.join();
    }

    void serve(int member) {
        uint32_t seen = 0;
        for (;;) {
            start_.wait_beyond(seen);
            ++seen;
            if (stopping_) return;
            const Region next = prefetch_;  // before the caller may write it again
            job_(context_, *this, member);
            barrier();
            prefetch(next, member, seen);
        }
    }

    // This thread's share of it, as long as no job comes.
    void prefetch(const Region& all, int member, uint32_t seen) {
        prefetching_.fetch_add(1);  // before the first check of whether it may
        const size_t share = all.bytes / (size_ - 1);
        const char *at = all.begin + share * (member - 1), *end = at + share;
        for (int line = 0; at < end; at += kLine, ++line) {
            if (line % kLook == 0 && (start_.now() != seen || !may_prefetch_.load())) break;
            (void)*(const volatile char*)at;  // most prefetches would be dropped, so many come at once
        }
        prefetching_.fetch_sub(1);
    }

    static constexpr int kLine = 64;  // bytes
    static constexpr int kLook = 32;  // lines between two checks for a job

    const int size_;
    std::vector<std::thread> threads_;
    Job job_ = nullptr;
    void* context_ = nullptr;
    Region prefetch_, expected_;
    Gate start_{20000}, meet_{2000};  // of some 10 to 25 nanoseconds each
    std::atomic<int> arrived_{0}, prefetching_{0};
    std::atomic<bool> may_prefetch_{true};
    alignas(64) std::atomic<int> next_{0};
    std::atomic<bool> stopping_{false};
};
