// The work on a range of elements, as one SIMD path does it. All paths give the same bits.
#pragma once

#include "abi.h"

// Elements of square_sum's blocks. Fixed, so that the order of additions depends on nothing but the length.
constexpr int64_t BLOCK = 16384;

struct Path {
  void (*update)(const Segment&, const Rule&, float factor, uint64_t seed, int64_t offset, int64_t count);
  void (*accumulate)(float* total, const void* gradient, Kind, float factor, bool first, int64_t count);
  double (*square_sum)(const void* values, Kind, int64_t count);  // count <= BLOCK
};

// Null where the compiler's target or the running processor has no such instructions.
const Path* portable_path();
const Path* avx2_path();
const Path* avx512_path();
