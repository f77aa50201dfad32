// Put before C++ that is built for a test: its allocations fail once so many have been made.
#pragma once

#include <cstdlib>
#include <new>

#define ONE_FOR_ALL_UNITS __attribute__((weak))

extern "C" {
ONE_FOR_ALL_UNITS int paceline_left = -1;  // allocations; below 0: as many as one likes
}

static void* allocated(std::size_t size, std::size_t alignment) {
    if (paceline_left == 0) throw std::bad_alloc();
    if (paceline_left > 0) --paceline_left;
    return std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment + alignment);
}

ONE_FOR_ALL_UNITS void* operator new(std::size_t n) { return allocated(n, 16); }
ONE_FOR_ALL_UNITS void* operator new[](std::size_t n) { return allocated(n, 16); }
ONE_FOR_ALL_UNITS void* operator new(std::size_t n, std::align_val_t to) { return allocated(n, (std::size_t)to); }
ONE_FOR_ALL_UNITS void* operator new[](std::size_t n, std::align_val_t to) { return allocated(n, (std::size_t)to); }
